"""Trains a small GPT-2 of transformers in two stages, split by measured time and memory.

pip install transformers
python examples/transformers_gpt2.py
"""

import torch
import transformers

from hybridtrain import HybridModel, World
from hybridtrain.loss import model_output


def main() -> None:
    """Trains for 5 steps on random tokens and prints the loss."""
    world = World.from_env(nb_part=2, devices="cpu")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=512, n_positions=64, use_cache=False
    )
    net = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, config.vocab_size, (8, 32))
    # the loss ignores labels of -100, used for padding
    batch = {"input_ids": tokens, "labels": tokens}
    model = HybridModel(net, world, chunks=4, split="balanced", example_inputs=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(f"layers of each stage: {model.plan.counts}")
    for step in range(5):
        out = model.train_step(batch, None, model_output)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}  loss {float(out.loss):.3f}")
    net.load_state_dict(model.state_dict())  # the names of the model of transformers
    world.close()


if __name__ == "__main__":
    main()
