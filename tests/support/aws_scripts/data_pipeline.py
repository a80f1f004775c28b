"""Stands for the module of this name beside AWS's scripts: lines of token ids in JSON files."""

import gzip
import json

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class PretrainingDataset(Dataset):
    def __init__(self, input_paths, max_sequence_length, zipped):
        self.input_paths = input_paths
        self.samples = []
        for path in input_paths:
            with gzip.open(path, "rt") if zipped else open(path) as file:
                self.samples += [json.loads(line)["input_ids"] for line in file]
        self.max_sequence_length = max_sequence_length

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        input_ids = torch.tensor(self.samples[index][: self.max_sequence_length])
        return input_ids, torch.ones_like(input_ids)


def create_pretraining_dataloader(
    input_paths,
    batch_size,
    max_sequence_length,
    seed,
    dp_rank,
    dp_size,
    shuffle,
    zipped,
    use_last_file_only,
    data_type,
):
    if use_last_file_only:
        input_paths = input_paths[-1:]
    data = PretrainingDataset(input_paths, max_sequence_length, zipped)
    sampler = DistributedSampler(data, dp_size, dp_rank, shuffle=shuffle, seed=seed, drop_last=True)
    return DataLoader(data, sampler=sampler, batch_size=batch_size, num_workers=0, drop_last=True)
