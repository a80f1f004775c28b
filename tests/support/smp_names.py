"""The configuration keys and names of smp 1.15 with the arguments that its documentation has.

From "PyTorch API" and "Common API" of smdistributed.modelparallel 1.15 in the SageMaker Python SDK,
its pages on activation checkpointing and tensor parallelism, and AWS's examples of GPT-2 and GPT-J
(`v3`, `gather_if_shard`, `gather_to_rank0`, `same_partition_load`, `register_post_step_hook`).
The keys are those of "Run a Distributed Training Job Using the SageMaker Python SDK", and
`tensor_parallel_seed`, `bf16` and others of the library's own list that AWS's scripts pass.
Names that refuse what they are for are in `REFUSED`, not in the table.
"""

CONFIG = {
    "partitions": 2,
    "pipeline_parallel_degree": 2,
    "microbatches": 4,
    "pipeline": "interleaved",
    "optimize": "speed",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "contiguous": True,
    "horovod": False,
    "memory_weight": 0.8,
    "ddp": True,
    "active_microbatches": 4,
    "deterministic_server": True,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "fp16": False,
    "fp16_params": False,
    "shard_optimizer_state": True,
    "prescaled_batch": True,
    "skip_tracing": True,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "bf16": False,
    "ddp_port": 8891,
    "ddp_dist_backend": "auto",
    "delayed_parameter_initialization": True,
    "fast_mode": False,
    "static_mode": False,
    "task_level_active_microbatches": False,
    "tensor_parallel_seed": 0,
}
"""The keys of `parameters`, each with a value that a script may pass."""

NONE = """
    is_initialized is_tracing default_partition
    rank size local_rank local_size
    get_world_process_group
    StepOutput.reduce_mean StepOutput.reduce_sum StepOutput.concat StepOutput.stack
    DistributedModel.no_sync DistributedModel.get_module DistributedModel.cpu
    DistributedModel.parameters DistributedModel.named_parameters
    DistributedModel.buffers DistributedModel.named_buffers
    DistributedModel.local_parameters DistributedModel.local_named_parameters
    DistributedModel.local_buffers DistributedModel.local_named_buffers
    DistributedModel.local_modules DistributedModel.local_named_modules
    DistributedModel.local_state_dict
    DistributedModel.distributed_modules DistributedModel.default_reducer_named_parameters
    DistributedModel.scaled_batch_reducer_named_parameters
    DistributedOptimizer.state_dict
"""

SIGNATURES = {
    **dict.fromkeys(NONE.split(), ""),
    **{
        f"{kind}_{what}": ""
        for kind in ("pp", "mp", "dp", "rdp", "tp")
        for what in ("rank", "size")
    },
    **{f"get_{kind}_process_group": "" for kind in ("pp", "mp", "dp", "rdp", "tp")},
    **{f"get_{kind}_group": "" for kind in ("pp", "mp", "dp", "rdp", "tp")},
    **{f"{kind}_barrier": "" for kind in ("pp", "mp", "dp", "rdp", "tp")},
    "init": "config",
    "barrier": "group",
    "broadcast": "obj group",
    "send": "obj dest_rank rank_type",
    "recv_from": "src_rank rank_type",
    "allgather": "obj group",
    "reduce_scatter": "parts group",
    "step": "non_split_inputs input_split_axes detach_outputs",
    "partition": "index",
    "set_partition": "module index",
    "get_partition": "module",
    "checkpoint": "module preserve_rng_state",
    "checkpoint_sequential": (
        "sequential_module input strategy preserve_rng_state pack_args_as_tuple"
    ),
    "set_activation_checkpointing": "module preserve_rng_state pack_args_as_tuple strategy",
    "save": "obj f partial pickle_module pickle_protocol v3",
    "load": "f map_location pickle_module partial",
    "save_checkpoint": (
        "path tag partial model optimizer user_content translate_if_full "
        "num_kept_partial_checkpoints"
    ),
    "resume_from_checkpoint": (
        "path tag partial strict load_optimizer load_sharded_optimizer_state translate_function"
    ),
    "model_creation": "tensor_parallelism dtype attention_in_fp32",
    "tensor_parallelism": "enabled attention_in_fp32",
    "set_tensor_parallelism": "module enabled attention_in_fp32",
    "delay_param_initialization": "enabled",
    "amp.GradScaler": "init_scale growth_factor backoff_factor growth_interval enabled",
    "nn.FusedLayerNorm": "normalized_shape eps elementwise_affine",
    "optimizers.FusedLAMB": "params lr",
    "optimizers.FusedNovoGrad": "params lr",
    "DistributedModel": (
        "module trace_device trace_execution_times overlapping_allreduce backward_passes_per_step "
        "average_grads_across_microbatches bucket_cap_mb trace_memory_usage broadcast_buffers "
        "find_unused_parameters gradient_as_bucket_view"
    ),
    "DistributedModel.backward": "tensors grad_tensors",
    "DistributedModel.register_post_partition_hook": "hook",
    "DistributedModel.register_post_step_hook": "hook",
    "DistributedModel.state_dict": "gather_to_rank0",
    "DistributedModel.load_state_dict": "state_dict strict same_partition_load",
    **{
        f"DistributedModel.is_{kind}_parameter": "param" for kind in ("distributed", "scaled_batch")
    },
    **{f"DistributedModel.is_{kind}_buffer": "buf" for kind in ("distributed", "scaled_batch")},
    "DistributedModel.to": "device",
    "DistributedModel.cuda": "device",
    "DistributedOptimizer": "optimizer static_loss_scale dynamic_loss_scale dynamic_loss_args",
    "DistributedOptimizer.local_state_dict": "gather_if_shard",
    "DistributedOptimizer.load_state_dict": "state_dict",
    "DistributedOptimizer.clip_master_grads": "max_norm",
}
"""The arguments of each name, by name: all that are documented."""

LOSS_SCALE = {
    **{"init_scale": 2.0**8, "scale_factor": 2.0, "scale_window": 1000, "min_scale": 1},
    **{"delayed_shift": 2, "consecutive_hysteresis": False},
}
"""What `dynamic_loss_args` may have."""

VALUES = """
    CommGroup RankType WORLD MP_GROUP DP_GROUP PP_GROUP RDP_GROUP TP_GROUP
    WORLD_RANK MP_RANK DP_RANK PP_RANK RDP_RANK TP_RANK __version__
    StepOutput.outputs DistributedModel.module DistributedModel.partitioned
    DistributedOptimizer.loss_scale DistributedOptimizer.overflow
"""
"""Names that are no functions."""

REFUSED = """
    tp_register tp_register_with_module fp16 sharded_data_parallel
    nn.DistributedLinear nn.DistributedEmbedding nn.DistributedTransformer
    nn.DistributedTransformerLMHead nn.DistributedTransformerLayer
    nn.DistributedAttentionLayer nn.DistributedTransformerOutputLayer nn.FlashAttentionLayer
    DistributedModel.join DistributedModel.register_comm_hook
"""
"""Names that are refused."""

NEW = """
    SplitDataset device config_from_distribution shutdown trains
    DistributedModel.clip_grad_norm_ DistributedModel.grad_norm
"""
"""Names that smp 1.x does not have."""
