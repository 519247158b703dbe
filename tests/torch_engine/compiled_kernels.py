"""Compile the kernels of passes by slot for GPUs, without one, and print the shared memory of each in bytes."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepspec.engines.torch_engine import slot_attention

TYPES = {"table": "*i32", "branches": "*i32", "parts": "*fp32", "sums": "*fp32", "scale": "fp32", "softcap": "fp32"}


def shared_memory(kernel, dtype: str, capability: int, fixed: dict[str, int], **options: int) -> int:  # type: ignore[no-untyped-def]
    """Return the shared memory of a kernel whose keys, values and outputs have a data type, such as `bf16`."""
    tensors = dict.fromkeys(("query", "keys", "values", "sinks", "output"), f"*{dtype}")
    types = {name: (TYPES | tensors).get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(fixed, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


found = {}
for capability, dtype, size in ((80, "bf16", 256), (89, "fp32", 128), (90, "bf16", 128), (90, "bf16", 256)):
    values = {"value_size": size, "block_values": size}
    for has_sinks in (False, True):
        fixed = {"splits": 8, "has_sinks": has_sinks}
        shared_memory(slot_attention._join_parts, dtype, capability, values | fixed, num_warps=1)
    fixed = {"packed": 4, "kv_heads": 8, "size": size, "block_size": size, "block_queries": slot_attention.MAX_QUERIES}
    fixed |= {"block_keys": 64 if dtype == "bf16" else 32}
    for further in ({"window": 0, "capped": False}, {"window": 128, "capped": True}):
        shared = shared_memory(
            slot_attention._attend_to_part,
            dtype,
            capability,
            values | fixed | further,
            num_stages=slot_attention.STAGES,
        )
        found[f"sm_{capability} {dtype} {size} window {further['window']}"] = shared
print(json.dumps(found))
