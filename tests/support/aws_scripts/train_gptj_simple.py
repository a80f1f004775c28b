"""In the structure of AWS's example gpt-j/train_gptj_simple.py: the same calls in the same order.

Without its branches for fp16, whose files need apex. The example of GPT-Neo has another config.
"""

import argparse
import math
import os
import re

import numpy as np
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
from data_pipeline import create_pretraining_dataloader
from learning_rates import AnnealingLR
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gptj import (
    translate_hf_gptj_state_dict_to_smdistributed,
    translate_state_dict_to_hf_gptj,
)
from torch import optim
from torch.nn.parallel.distributed import DistributedDataParallel
from transformers import AutoModelForCausalLM, GPTJConfig, set_seed


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
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    return loss


def save(file, model, optimizer, lr_scheduler, model_config, total_steps, args, partial, batch_idx):
    save_dict = {
        "cli_args": args.__dict__,
        "total_steps": total_steps,
        "model_config": model_config,
        "batch_idx": batch_idx,
    }
    if lr_scheduler is not None:
        save_dict["lr_scheduler"] = lr_scheduler.state_dict()
    if partial:
        if args.gather_if_shard > 0 or smp.rdp_rank() == 0:
            save_dict["model"] = model.local_state_dict()
    else:
        model_state_dict = model.state_dict(gather_to_rank0=True)
        if smp.rank() == 0:
            save_dict["model"] = translate_state_dict_to_hf_gptj(
                model_state_dict, args.max_context_width
            )
    if partial:
        save_dict["optimizer"] = optimizer.local_state_dict(gather_if_shard=args.gather_if_shard)
    elif not args.skip_full_optimizer:
        save_dict["optimizer"] = optimizer.state_dict()
    if not args.gather_if_shard or (smp.rdp_rank() == 0 and partial) or smp.rank() == 0:
        smp.save(save_dict, file, partial=partial, v3=not args.gather_if_shard)


def load_model_and_optimizer(output_dir, model, optimizer, lr_scheduler, partial, args):
    pattern = r"trained_gpt_steps-(?P<total_steps>\d+)\.pt" + (
        r"_(?P<rank>\d+)" if partial else "$"
    )
    found = [(re.match(pattern, p), p) for p in os.listdir(output_dir)]
    newest = sorted(((int(m["total_steps"]), p) for m, p in found if m), reverse=True)[0][1]
    local_ckpt_path = os.path.join(output_dir, newest)
    if partial:
        local_ckpt_path = local_ckpt_path.split(".pt")[0] + ".pt"
    if args.gather_if_shard > 0:
        checkpoint = smp.load(local_ckpt_path, partial=partial)
    else:
        checkpoint = torch.load(f"{local_ckpt_path}_{smp.pp_rank()}_{smp.tp_rank()}_0")
        if smp.rdp_rank() != 0:
            own = f"{local_ckpt_path}_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}"
            checkpoint["optimizer"] = torch.load(own)["optimizer"]
    weights = translate_hf_gptj_state_dict_to_smdistributed(checkpoint["model"], 16)
    model.load_state_dict(weights, same_partition_load=args.same_partition_load > 0)
    lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])

    def opt_load_hook(mod, opt):
        opt.load_state_dict(checkpoint["optimizer"])

    model.register_post_step_hook(opt_load_hook)
    return checkpoint["total_steps"], checkpoint["batch_idx"]


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

    def loader(folder, batch_size):
        paths = sorted(os.path.join(folder, p) for p in os.listdir(folder))
        return create_pretraining_dataloader(
            paths,
            batch_size,
            args.max_context_width,
            seed=args.seed,
            dp_rank=smp.rdp_rank(),
            dp_size=smp.rdp_size(),
            shuffle=args.same_seed < 1,
            zipped=args.zipped_data > 0,
            use_last_file_only=True,
            data_type="GPT",
        )

    train_dataloader = loader(args.training_dir, args.train_batch_size)
    val_dataloader = loader(args.test_dir, args.val_batch_size)
    set_seed(args.seed)
    for batch_idx, (input_ids, attention_mask) in enumerate(train_dataloader):
        if batch_idx < start_batch_index:
            continue
        if total_steps >= args.max_steps:
            break
        optimizer.zero_grad()
        loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        loss = loss_mb.reduce_mean()
        optimizer.step()
        lr_scheduler.step()
        total_steps += 1
        if smp.rank() == 0:
            print(f"Batch {total_steps - 1} Loss: {loss.item()}")
        if args.validation_freq and not (total_steps % args.validation_freq):
            cur_state = np.random.get_state()
            model = model.eval()
            val_loss, _ = eval_model(model, val_dataloader, args.validation_batches)
            if smp.rank() == 0:
                print(f"Validation loss: {val_loss}")
            model = model.train()
            np.random.set_state(cur_state)
        if not (total_steps % args.checkpoint_freq):
            out_path = os.path.join(args.checkpoint_dir, f"trained_gpt_steps-{total_steps}.pt")
            save(
                out_path,
                model,
                optimizer,
                lr_scheduler,
                model_config,
                total_steps,
                args,
                partial=True,
                batch_idx=batch_idx + 1,
            )
    return total_steps


def parse_args():
    parser = argparse.ArgumentParser()
    for name, default in {
        **{"train_batch_size": 4, "val_batch_size": 4, "max_steps": 4, "seed": 12345},
        **{"same_seed": 0, "fp16": 0, "fp32_grad_accumulation": 0, "activation_checkpointing": 1},
        **{"zipped_data": 1, "save_final_full_model": 0, "load_partial": 0, "load_full": 0},
        **{"prescaled_batch": 1, "max_context_width": 16, "vocab_size": 64, "hidden_width": 32},
        **{"num_layers": 4, "num_heads": 2, "use_adamw": 0, "match_weights": 0},
        **{"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "microbatches": 1},
        **{"shard_optimizer_state": 0, "offload_activations": 0, "delayed_param": 0},
        **{"fast_mode": 0, "static_mode": 0, "skip_tracing": 0, "activation_loading_horizon": 4},
        **{"attention_in_fp32": 0, "manual_partition": 0, "same_partition_load": 0},
        **{"query_key_layer_scaling": 1, "fused_softmax": 1, "fused_bias_gelu": 1},
        **{"gather_if_shard": 1, "skip_full_optimizer": 1},
        **{"checkpoint_freq": 2, "validation_freq": 2, "validation_batches": 1},
        "lr_decay_iters": 6,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {
        **{"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95, "lr": 1e-2},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "warmup": 0.2},
    }.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--optimize", default="speed")
    parser.add_argument("--placement_strategy", default="cluster")
    parser.add_argument("--activation_strategy", default="each")
    parser.add_argument("--checkpoint-dir", default="/opt/ml/checkpoints")
    parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--training-dir", default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--test-dir", default=os.environ["SM_CHANNEL_TEST"])
    args, _ = parser.parse_known_args()
    return args


def make_config(args):
    return GPTJConfig(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        activation_function="gelu_new",
        resid_pdrop=args.resid_pdrop,
        embd_pdrop=args.embd_pdrop,
        attn_pdrop=args.attn_pdrop,
        use_cache=True,
        bos_token_id=0,
        eos_token_id=0,
        return_dict=True,
        rotary_dim=8,
    )


def main():
    args = parse_args()
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "checkpoint_attentions": not args.activation_checkpointing,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "_match_weights": args.match_weights > 0,
        "fp16_params": args.fp16 > 0,
        "offload_activations": args.offload_activations > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "_fp32_grad_accumulation": args.fp32_grad_accumulation > 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
    }
    smp.init(smp_config)
    if smp.rank() == 0:
        print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")
    model_config = make_config(args)
    set_seed(args.seed)
    with (
        smp.tensor_parallelism(
            enabled=smp.tp_size() > 1,
            attention_in_fp32=args.attention_in_fp32 > 0,
            query_key_layer_scaling=args.query_key_layer_scaling > 0,
            fused_softmax=args.fused_softmax > 0,
            fused_bias_gelu=args.fused_bias_gelu > 0,
        ),
        smp.delay_param_initialization(
            enabled=(smp.tp_size() > 1 and args.match_weights < 1 and args.delayed_param > 0)
        ),
    ):
        model = AutoModelForCausalLM.from_config(model_config)
    torch.cuda.set_device(smp.local_rank())
    if not args.same_seed:
        set_seed(args.seed + smp.tp_rank())
    model = smp.DistributedModel(model, trace_device="gpu")
    m = model
    transformer_layers = m.module.module.transformer.h
    if args.manual_partition:
        div, rem = divmod(args.num_layers, smp.pp_size())
        assignments = []
        for pp_rank in range(smp.pp_size()):
            nl = div + 1 if pp_rank >= smp.pp_size() - rem else div
            assignments += [pp_rank for _ in range(nl)]
        for i, c in enumerate(transformer_layers.children()):
            smp.set_partition(c, assignments[i])
    iter_model = model
    while isinstance(iter_model, DistributedDataParallel):
        iter_model = iter_model.module
    kind = optim.AdamW if args.use_adamw > 0 else optim.Adam
    optimizer = kind(
        get_param_groups_by_weight_decay(iter_model),
        betas=(args.beta1, args.beta2),
        lr=args.lr,
        weight_decay=args.weight_decay,
    )
    if args.activation_checkpointing:
        kwargs = {}
        if isinstance(transformer_layers, nn.Sequential):
            kwargs["pack_args_as_tuple"] = True
            kwargs["strategy"] = args.activation_strategy
        smp.set_activation_checkpointing(transformer_layers, **kwargs)
    optimizer = smp.DistributedOptimizer(optimizer)
    lr_scheduler = AnnealingLR(
        optimizer,
        start_lr=args.lr,
        warmup_iter=args.warmup * args.lr_decay_iters,
        total_iters=args.lr_decay_iters,
    )
    total_steps = start_batch_index = 0
    if args.load_full or args.load_partial:
        partial = not args.load_full
        path = args.checkpoint_dir if partial else args.model_dir
        total_steps, start_batch_index = load_model_and_optimizer(
            path, model, optimizer, lr_scheduler, partial, args
        )
    total_steps = train(
        model, optimizer, lr_scheduler, model_config, start_batch_index, total_steps, args
    )
    if args.save_final_full_model and smp.rdp_rank() == 0:
        out_path = os.path.join(args.model_dir, f"trained_gpt_steps-{total_steps}.pt")
        save(
            out_path,
            model,
            optimizer,
            lr_scheduler,
            model_config,
            total_steps,
            args,
            partial=False,
            batch_idx=0,
        )
    smp.barrier()
    if smp.rank() == 0:
        print("SMP training finished successfully")


if __name__ == "__main__":
    main()
