"""In the structure of AWS's example bert_example/sagemaker_smp_pretrain.py, in fp32.

The model is transformers', which has the arguments and outputs of the one beside AWS's script.
"""

import argparse
import math
import os
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.optimizers import FusedLAMB
from torch.utils.data import DataLoader, Dataset, RandomSampler
from transformers import BertConfig, BertForPreTraining


class PretrainingDataset(Dataset):
    def __init__(self, input_file, max_pred_length):
        self.inputs = list(np.load(input_file).values())
        self.max_pred_length = max_pred_length

    def __len__(self):
        return len(self.inputs[0])

    def __getitem__(self, index):
        [input_ids, input_mask, segment_ids, positions, ids, next_sentence_labels] = [
            torch.from_numpy(np.asarray(values[index].astype(np.int64))) for values in self.inputs
        ]
        masked_lm_labels = torch.ones(input_ids.shape, dtype=torch.long) * -1
        masked_lm_labels[positions] = ids
        return [input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels]


class BertPretrainingCriterion(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-1)
        self.vocab_size = vocab_size

    def forward(self, prediction_scores, seq_relationship_score, masked_lm_labels, labels):
        masked_lm_loss = self.loss_fn(
            prediction_scores.view(-1, self.vocab_size), masked_lm_labels.view(-1)
        )
        return masked_lm_loss + self.loss_fn(seq_relationship_score.view(-1, 2), labels.view(-1))


class PolyWarmUpScheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, warmup, total_steps, degree=0.5):
        self.warmup, self.total_steps, self.degree = warmup, total_steps, degree
        super().__init__(optimizer)

    def get_lr(self):
        progress = self.last_epoch / self.total_steps
        if progress < self.warmup:
            return [base * progress / self.warmup for base in self.base_lrs]
        return [base * (1.0 - progress) ** self.degree for base in self.base_lrs]


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--input_dir", required=True)
    parser.add_argument("--config_file", required=True)
    parser.add_argument("--output_dir", required=True)
    for name, default in {
        **{"max_predictions_per_seq": 4, "train_batch_size": 8, "max_steps": 8, "seed": 4211},
        **{"gradient_accumulation_steps": 1, "steps_this_run": 4, "num_steps_per_checkpoint": 2},
        **{"resume_from_checkpoint": 0, "resume_step": -1, "smp": 1, "apply_optimizer": 1},
        **{"skip_checkpoint": 0, "save-full": 0, "do_train": 1},
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--local_rank", type=int, default=os.getenv("LOCAL_RANK", -1))
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--warmup_proportion", type=float, default=0.3)
    parser.add_argument("--partial-checkpoint", type=bool, default=True)
    return parser.parse_args()


def setup_training(args):
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    args.n_gpu = 1
    print(f"device: {device}, mp_rank: {smp.mp_rank()}, rank: {smp.rank()}")
    os.makedirs(args.output_dir, exist_ok=True)
    return device, args


def prepare_model_and_optimizer(args, device):
    config = BertConfig.from_json_file(args.config_file)
    if config.vocab_size % 8 != 0:
        config.vocab_size += 8 - (config.vocab_size % 8)
    model = BertForPreTraining(config)
    model = smp.DistributedModel(model)
    checkpoint = None
    global_step = 0
    if args.resume_from_checkpoint:
        if args.resume_step == -1:
            names = [f for f in os.listdir(args.output_dir) if ".pt" in f]
            args.resume_step = max(int(x.split(".pt")[0].split("_")[1].strip()) for x in names)
        global_step = args.resume_step
        checkpoint = smp.load(
            os.path.join(args.output_dir, f"ckpt_{global_step}.pt"),
            partial=args.partial_checkpoint,
        )
        model.load_state_dict(checkpoint["model"], strict=False)
    model.to(device)
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = FusedLAMB(optimizer_grouped_parameters, lr=args.learning_rate)
    optimizer = smp.DistributedOptimizer(optimizer)
    lr_scheduler = PolyWarmUpScheduler(
        optimizer, warmup=args.warmup_proportion, total_steps=args.max_steps
    )
    if args.resume_from_checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    criterion = BertPretrainingCriterion(config.vocab_size)
    return model, optimizer, lr_scheduler, checkpoint, global_step, criterion


def take_optimizer_step(args, optimizer, model, global_step):
    if args.apply_optimizer > 0:
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    return global_step + 1


@smp.step
def smp_step(
    args,
    device,
    input_ids,
    segment_ids,
    input_mask,
    masked_lm_labels,
    next_sentence_labels,
    model,
    optimizer,
    criterion,
    step,
):
    rval = train_step(
        args,
        device,
        input_ids,
        segment_ids,
        input_mask,
        masked_lm_labels,
        next_sentence_labels,
        model,
        optimizer,
        criterion,
        step,
    )
    return rval


def train_step(
    args,
    device,
    input_ids,
    segment_ids,
    input_mask,
    masked_lm_labels,
    next_sentence_labels,
    model,
    optimizer,
    criterion,
    step,
):
    prediction_scores, seq_relationship_score = model(
        input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask
    )
    loss = criterion(
        prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels
    )
    if args.n_gpu > 1:
        loss = loss.mean()
    if args.smp > 0:
        model.backward(loss)
    else:
        loss.backward()
    return loss


def main():
    args = parse_arguments()
    random.seed(args.seed + args.local_rank)
    np.random.seed(args.seed + args.local_rank)
    torch.manual_seed(args.seed + args.local_rank)
    torch.cuda.manual_seed(args.seed + args.local_rank)
    device, args = setup_training(args)
    model, optimizer, lr_scheduler, _, global_step, criterion = prepare_model_and_optimizer(
        args, device
    )
    files = sorted(
        os.path.join(args.input_dir, f) for f in os.listdir(args.input_dir) if "training" in f
    )
    random.Random(args.seed).shuffle(files)
    dpsize, dprank = smp.dp_size(), smp.dp_rank()
    assert math.isfinite(dpsize)
    train_data = PretrainingDataset(files[dprank % len(files)], args.max_predictions_per_seq)
    train_dataloader = DataLoader(
        train_data,
        sampler=RandomSampler(train_data),
        batch_size=args.train_batch_size * args.n_gpu,
        num_workers=0,
        drop_last=True,
    )
    for training_steps, batch in enumerate(train_dataloader, 1):
        batch = [t.to(device) for t in batch]
        input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels = batch
        model.train()
        loss_mbs = smp_step(
            args,
            device,
            input_ids,
            segment_ids,
            input_mask,
            masked_lm_labels,
            next_sentence_labels,
            model,
            optimizer,
            criterion,
            training_steps,
        )
        loss = loss_mbs.reduce_mean()
        if smp.rank() == 0:
            print("Loss:", loss.item())
        if training_steps % args.gradient_accumulation_steps == 0:
            lr_scheduler.step()
            global_step = take_optimizer_step(args, optimizer, model, global_step)
        is_last = global_step >= args.steps_this_run
        if is_last or training_steps % args.num_steps_per_checkpoint == 0:
            if smp.dp_rank() == 0 and not args.skip_checkpoint:
                save_dict = {
                    "model": model.local_state_dict(),
                    "optimizer": optimizer.local_state_dict(),
                    "files": [1, *files],
                    "epoch": 0,
                    "data_loader": None if is_last else train_dataloader,
                }
                file = os.path.join(args.output_dir, f"ckpt_{global_step}.pt")
                smp.save(save_dict, file, partial=True)
        if is_last:
            break
    smp.barrier()


if __name__ == "__main__":
    main()
