"""vLLM's settings that streamllm does not have (yet).

A command line or a script that moves over must never be misunderstood: a setting of vLLM's is honoured (it is
a field of the configuration), accepted because its value changes nothing here, or refused by name.
"""

from __future__ import annotations

from typing import Any

from streamllm.errors import ConfigError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "skip_tokenizer_init": (False,),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),
    "hf_overrides": (None, {}),
    "enable_chunked_prefill": (True, None),
    "load_format": ("auto",),
    "config_format": ("auto",),
    "model_impl": ("auto",),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed"),
    "task": ("auto", "generate", "embed"),
    "max_logprobs": (20,),
    "async_scheduling": (True, None),
    "disable_custom_all_reduce": (True, False),
    "speculative_config": (None,),
    "compilation_config": (None,),
    "lora_dtype": ("auto",),
    "fully_sharded_loras": (False,),
    "enable_log_requests": (False,),
    "disable_log_requests": (True,),
    "enable_request_id_headers": (True, False),
    "enable_server_load_tracking": (True, False),
    "enable_offline_docs": (True, False),
    "enable_prompt_tokens_details": (True, False),
    "enable_sleep_mode": (False,),
    "enable_auto_tool_choice": (True, False),
    "override_generation_config": (None, {}),
    "download_dir": (None,),
    "stream_interval": (1,),
}
"""Settings that are accepted at these values, because they change nothing here."""

UNSUPPORTED = frozenset(
    """
    allowed_local_media_path allowed_media_domains api_server_count attention_backend attention_config
    code_revision collect_detailed_traces cudagraph_metrics data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb decode_context_parallel_size
    disable_hybrid_kv_cache_manager enable_eplb enable_expert_parallel enable_force_include_usage
    enable_log_deltas enable_log_outputs enable_mfu_metrics enable_prompt_embeds enable_ssl_refresh
    enable_tokenizer_info_endpoint fingerprint_mode fingerprint_value guided_decoding_backend headless
    hf_config_path hf_token kv_cache_dtype_skip_layers
    kv_events_config kv_offloading_backend kv_offloading_size kv_transfer_config limit_mm_per_prompt
    log_config_file log_error_stack master_addr master_port max_log_len max_long_partial_prefills
    max_seq_len_to_capture middleware mm_processor_cache_gb mm_processor_kwargs nnodes node_rank
    num_scheduler_steps numa_bind optimization_level otlp_metrics_endpoint prefill_context_parallel_size
    prefix_caching_hash_algo response_role return_tokens_as_token_ids scheduler_cls
    show_hidden_metrics_for_version ssl_ciphers structured_outputs_config tokens_only tool_server
    """.split()  # noqa: SIM905
)
"""vLLM's other settings: refused whatever their value."""

SHORT_FLAGS = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "q": "quantization", "asc": "api_server_count", "O": "compilation_config",
}  # fmt: skip


def check_other_setting(name: str, value: Any) -> bool:
    """Whether ``name`` is a setting of vLLM's that may be passed over at this ``value``.

    Raises:
        ConfigError: streamllm does not support it (at this value).
    """
    flag = "--" + name.replace("_", "-")
    if name in NEUTRAL:
        if any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
            return True
        allowed = " or ".join(str(neutral) for neutral in NEUTRAL[name] if neutral is not None)
        hint = f"; only {allowed} is accepted" if allowed else "; leave it out"
        raise ConfigError(f"{flag} {value} is not supported yet{hint}.")
    if name in UNSUPPORTED:
        raise ConfigError(f"{flag} is a vLLM setting that streamllm does not support yet; leave it out.")
    return False
