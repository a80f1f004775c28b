"""In the structure of AWS's example gpt2/train_gpt_simple.py: the same calls in the same order."""

import argparse
import math
import os

import numpy as np
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
from data_pipeline import create_pretraining_dataloader
from learning_rates import AnnealingLR
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from torch import optim
from transformers import AutoModelForCausalLM, GPT2Config, set_seed


def get_param_groups_by_weight_decay(module):
    decayed, others = {"params": []}, {"params": [], "weight_decay": 0.0}
    seen = set()
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and id(p) not in seen:
                plain = isinstance(part, LayerNorm) or name == "bias"
                (others if plain else decayed)["params"].append(p)
                seen.add(id(p))
    return decayed, others


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    if args.logits_output:
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
        loss = output["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    if args.logits_output:
        return output
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    return loss


def eval_model(model, dataloader, num_batches):
    model = model.eval()
    n_batches = 0
    loss = 0.0
    with torch.no_grad():
        for batch_idx, (input_ids, attention_mask) in enumerate(dataloader):
            if batch_idx >= num_batches:
                break
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            n_batches += 1
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    loss /= smp.dp_size()
    loss /= n_batches
    return loss.item(), math.exp(loss.item())


def train(model, optimizer, lr_scheduler, model_config, start_batch_index, total_steps, args):
    model.train()
    dp_rank = smp.dp_rank() if not args.prescaled_batch else smp.rdp_rank()
    dp_size = smp.dp_size() if not args.prescaled_batch else smp.rdp_size()

    def loader(folder, batch_size, shuffle):
        paths = sorted(os.path.join(folder, p) for p in os.listdir(folder))
        return create_pretraining_dataloader(
            paths,
            batch_size,
            args.max_context_width,
            seed=args.seed,
            dp_rank=dp_rank,
            dp_size=dp_size,
            shuffle=shuffle,
            zipped=args.zipped_data > 0,
            use_last_file_only=True,
            data_type="openwebtext",
        )

    train_dataloader = loader(args.training_dir, args.train_batch_size, args.same_seed < 1)
    val_dataloader = loader(args.test_dir, args.val_batch_size, True)
    set_seed(args.seed)

    def grad_accumulation_boundary(batch_idx):
        return batch_idx % args.gradient_accumulation == args.gradient_accumulation - 1

    for batch_idx, (input_ids, attention_mask) in enumerate(train_dataloader):
        if batch_idx < start_batch_index:
            continue
        if total_steps >= args.max_steps:
            break
        if grad_accumulation_boundary(batch_idx - 1):
            optimizer.zero_grad(set_to_none=True)
        if args.logits_output:
            train_output = train_step(model, optimizer, input_ids, attention_mask, args)
            loss_mb = train_output["loss"]
            logits = torch.cat(tuple(train_output["logits"].outputs), dim=0)
            assert logits.shape[0] == input_ids.shape[0]
        else:
            loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        loss = loss_mb.reduce_mean()
        if grad_accumulation_boundary(batch_idx):
            if args.fp16:
                optimizer.clip_master_grads(args.grad_clip)
            optimizer.step()
            if not (args.fp16 and optimizer.overflow):
                lr_scheduler.step()
        total_steps += 1
        if smp.rank() == 0:
            print(f"Batch {total_steps - 1} Loss: {loss.item()}")
        if args.validation_freq and not (total_steps % args.validation_freq):
            model = model.eval()
            val_loss, val_ppl = eval_model(model, val_dataloader, args.validation_batches)
            if smp.rank() == 0:
                print(f"Validation loss: {val_loss}, perplexity: {val_ppl}")
            model = model.train()
        if not (total_steps % args.checkpoint_freq):
            user_content = {
                "cli_args": args.__dict__,
                "total_steps": total_steps,
                "model_config": model_config,
                "start_batch_index": batch_idx + 1,
            }
            user_content["lr_scheduler"] = lr_scheduler.state_dict()
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=user_content,
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    return total_steps


def parse_args():
    parser = argparse.ArgumentParser()
    for name, default in {
        **{"train_batch_size": 4, "val_batch_size": 4, "max_steps": 4, "seed": 12345},
        **{"same_seed": 0, "fp16": 0, "bf16": 0, "activation_checkpointing": 1},
        **{"zipped_data": 1, "save_final_full_model": 0, "load_partial": 0, "load_full": 0},
        **{"prescaled_batch": 1, "max_context_width": 16, "vocab_size": 64, "hidden_width": 32},
        **{"num_layers": 4, "num_heads": 2, "use_adamw": 0, "use_distributed_transformer": 0},
        **{"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "microbatches": 1},
        **{"shard_optimizer_state": 0, "offload_activations": 0, "delayed_param": 0},
        **{"fast_mode": 0, "static_mode": 0, "skip_tracing": 0, "activation_loading_horizon": 4},
        **{"sharded_data_parallel_degree": 1, "attention_in_fp32": 0, "manual_partition": 0},
        **{"query_key_layer_scaling": 1, "fused_softmax": 1, "fused_dropout": 0},
        **{"fused_bias_gelu": 1, "gradient_accumulation": 1, "num_kept_checkpoints": 5},
        **{"checkpoint_freq": 2, "validation_freq": 2, "validation_batches": 1},
        "lr_decay_iters": 6,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {
        **{"grad_clip": 1.0, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95, "lr": 1e-2},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "warmup": 0.2},
    }.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, default in {
        **{"optimize": "speed", "placement_strategy": "cluster", "partition_assignment": ""},
        "logits_output": "",
    }.items():
        parser.add_argument(f"--{name}", type=str, default=default)
    parser.add_argument("--checkpoint-dir", default="/opt/ml/checkpoints")
    parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--training-dir", default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--test-dir", default=os.environ["SM_CHANNEL_TEST"])
    args, _ = parser.parse_known_args()
    return args


def main():
    args = parse_args()
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
    }
    smp.init(smp_config)
    if smp.rank() == 0:
        print("Arguments:", args.__dict__)
        print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")
    model_config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        activation_function="gelu_new",
        resid_pdrop=args.resid_pdrop,
        embd_pdrop=args.embd_pdrop,
        attn_pdrop=args.attn_pdrop,
        summary_type="cls_index",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        return_dict=True,
    )
    set_seed(args.seed)
    dtype = torch.get_default_dtype()
    if args.fp16:
        dtype = torch.float16
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=dtype,
        attention_in_fp32=args.attention_in_fp32 > 0,
        query_key_layer_scaling=args.query_key_layer_scaling > 0 and args.bf16 < 1,
        fused_softmax=args.fused_softmax > 0,
        fused_dropout=args.fused_dropout > 0,
        fused_bias_gelu=args.fused_bias_gelu > 0,
    ):
        model = AutoModelForCausalLM.from_config(model_config)
    num_params = sum(np.prod(p.size()) for p in model.parameters())
    if smp.rank() == 0:
        print(f"# total parameters: {num_params}")
    torch.cuda.set_device(smp.local_rank())
    if not args.same_seed:
        set_seed(args.seed + smp.tp_rank())
    model = smp.DistributedModel(
        model, trace_device="gpu", backward_passes_per_step=args.gradient_accumulation
    )
    m = model.get_module()
    transformer_layers = m.transformer.h
    if args.manual_partition:
        div, rem = divmod(args.num_layers, smp.pp_size())
        assignments = []
        for pp_rank in range(smp.pp_size()):
            nl = div + 1 if pp_rank >= smp.pp_size() - rem else div
            assignments += [pp_rank for _ in range(nl)]
        for i, c in enumerate(transformer_layers.children()):
            smp.set_partition(c, assignments[i])
    kind = optim.AdamW if args.use_adamw > 0 else optim.Adam
    optimizer = kind(
        get_param_groups_by_weight_decay(m),
        betas=(args.beta1, args.beta2),
        lr=args.lr,
        weight_decay=args.weight_decay,
    )
    if args.activation_checkpointing:
        for c in transformer_layers.children():
            smp.set_activation_checkpointing(c)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = AnnealingLR(
        optimizer,
        start_lr=args.lr,
        warmup_iter=args.warmup * args.lr_decay_iters,
        total_iters=args.lr_decay_iters,
    )
    model.register_post_partition_hook(lambda model, optimizer: print("After_partition"))
    total_steps = start_batch_index = 0
    if args.load_full or args.load_partial:
        partial = not args.load_full
        path = args.checkpoint_dir if partial else args.model_dir
        tag = None if partial else "fullmodel.pt"
        user_content = smp.resume_from_checkpoint(path, tag=tag, partial=partial)
        total_steps = user_content["total_steps"] if partial else 0
        start_batch_index = user_content.get("start_batch_index", 0)
        assert isinstance(user_content["model_config"], GPT2Config)
        if "lr_scheduler" in user_content:
            lr_scheduler.load_state_dict(user_content["lr_scheduler"])
    total_steps = train(
        model, optimizer, lr_scheduler, model_config, start_batch_index, total_steps, args
    )
    if args.save_final_full_model:
        user_content = {
            "cli_args": args.__dict__,
            "num_params": num_params,
            "total_steps": total_steps,
            "model_config": model_config,
        }
        smp.save_checkpoint(
            args.model_dir,
            tag="fullmodel.pt",
            partial=False,
            model=model,
            user_content=user_content,
        )
    smp.barrier()
    if smp.rank() == 0:
        print("SMP training finished successfully")


if __name__ == "__main__":
    main()
