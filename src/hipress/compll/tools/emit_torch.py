"""The fixed text of packages for torch: what stands around the functions that `emit` writes."""

from __future__ import annotations

WRAPPER_HEAD = '''\
"""{title}: functions on torch tensors, {mark}: edit the program, not this file.

`encode` makes a HiPress frame (a header of 80 bytes, then the body) that `hipress.codec` of the
same program reads, and the other way round. On the CPU one thread works on a call. On a GPU a call
only launches kernels; damage that these find in a payload is reported by the next call.
"""

import functools
import hashlib
import importlib
import struct
import threading
import zlib

import numpy as np
import torch as _torch

from . import body as _body

PROGRAM = (
{program}
)
"""The program; a frame carries a hash of it and of the parameters."""

_VALUES = {values}
_ENCODE = {encode_order}
_DECODE = {decode_order}
_HAS_GPU = {gpu}
_HAS_RATIO = {ratio}
'''
"""Opens wrapper.py. _VALUES: parameters in order, None for floats; _ENCODE, _DECODE: which of the
floats a kernel takes (alpha, mu and lr_ratio come last); _HAS_RATIO: whether lr_ratio is one."""

SUPPORT = '''

_HEAD = struct.Struct("<4sHHQIIQQIIIIQQQ")
_MAX_NUMEL = 2**32 - 1
_local = threading.local()


def _encode(x, states, rng, floats, ours):
    _check("x", x, _torch.float32, _torch.float16, _torch.bfloat16)
    numel = x.numel()
    arrays = []
    for name, held in states:
        _check(name, held, _torch.float32, beside=x)
        if held.numel() != numel or not held.is_contiguous():
            raise ValueError(
                f"{name} has {held.numel()} elements in strides {held.stride()}; x needs {numel}, "
                "contiguous."
            )
        arrays.append(held.detach().view(-1))
    seed, stream, step = rng
    rng = seed % 2**64, stream % 2**32, step % 2**32
    frame = _torch.empty(_wire_bytes(numel, floats), dtype=_torch.uint8, device=x.device)
    if _on_gpu(x):
        _encode_on_gpu(x, arrays, rng, floats, ours, frame)
        return frame
    arrays = [held.numpy() for held in arrays]
    data = frame.numpy()
    body = data[_HEAD.size :]
    flags = 0
    if numel:
        flat = x.detach().float().contiguous().view(-1).numpy()
        params = tuple(float((*floats, *ours)[k]) for k in _ENCODE)
        flags = int(_body.encode(numel, params, rng, body, flat, arrays, _scratch))
    else:
        body[:] = 0
    data[: _HEAD.size] = np.frombuffer(_head(numel, floats, flags, rng[2]), np.uint8)
    return frame


def _head(numel, floats, flags=0, step=0):
    """Header and table of the frame of some elements."""
    size = _wire_bytes(numel, floats)
    fields = [b"HiPF", 1, flags, step, 0, 1, _hash(floats), size, 0, 0, 0, 0, 0, numel]
    fields.append(size - _HEAD.size)
    fields[4] = zlib.crc32(_HEAD.pack(*fields)[20:])
    return _HEAD.pack(*fields)


def _decode(payload, numel, alpha, floats):
    if not 0 <= numel <= _MAX_NUMEL:
        raise ValueError(f"numel is {numel}; a frame holds 0 to {_MAX_NUMEL} elements.")
    out = _torch.empty(numel, dtype=_torch.float32, device=payload.device)
    _decode_into("decode", payload, out, alpha, floats)
    return out


def _decode_into(name, payload, out, alpha, floats):
    _check("out", out, _torch.float32)
    if not out.is_contiguous():
        raise ValueError("out is not contiguous; decode into a contiguous tensor and copy.")
    out = out.detach().view(-1)
    payload = _sized(payload, out, floats)
    if _on_gpu(out):
        _decode_on_gpu(name, payload, out, alpha, floats)
        return
    body, nonfinite = _open(payload, out.numel(), floats)
    if nonfinite:
        out.fill_(float("nan"))
    elif out.numel():
        params = tuple(float((*floats, alpha)[k]) for k in _DECODE)
        kernel = getattr(_body, name)
        refusal = kernel(out.numel(), params, (0, 0, 0), body, out.numpy(), _scratch)
        if refusal is not None:
            raise ValueError(f"the payload is damaged: {refusal}; send it again.")


def _sized(payload, out, floats):
    """The payload on a boundary that kernels take; one of another length is refused."""
    _check("payload", payload, _torch.uint8, beside=out)
    numel = out.numel()
    size = _wire_bytes(numel, floats)
    if payload.dim() != 1 or payload.numel() != size:
        raise ValueError(
            f"the payload has {payload.numel()} bytes in {payload.dim()} dimensions; that of "
            f"{numel} elements has {size} in one."
        )
    payload = payload.detach().contiguous()
    return payload.clone() if payload.data_ptr() % 16 else payload  # kernels read words from it


def _open(payload, numel, floats):
    """The body of a frame, and whether its gradient had a NaN or Inf; refuses other frames."""
    data, size = payload.numpy(), payload.numel()
    fields = _HEAD.unpack_from(data)
    expected = {
        "magic": (fields[0], b"HiPF"),
        "version": (fields[1], 1),
        "check": (fields[4], zlib.crc32(data[20 : _HEAD.size])),
        "codec hash": (fields[6], _hash(floats)),
        "flags": (fields[2] & 0xFFFE, 0),
        "number of bodies": (fields[5], 1),
        "total bytes": (fields[7], size),
        "reserved bytes": (fields[12], 0),
        "number of elements": (fields[13], numel),
        "body bytes": (fields[14], size - _HEAD.size),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise ValueError(
                f"the payload has {name} {found!r} where this codec writes {wanted!r}: it is "
                "damaged, or of another program or other parameters."
            )
    return data[_HEAD.size :], bool(fields[2] & 1)


def _hash(floats):
    left = iter(floats)
    values = tuple((n, float(next(left)) if v is None else v) for n, v in _VALUES)
    identity = repr((PROGRAM, values, 1, "philox4x32-7")).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _wire_bytes(numel, floats):
    return _HEAD.size + _body.body_bytes(numel, tuple((*floats, 0.0)[k] for k in _ENCODE))


def _check(name, tensor, *dtypes, beside=None):
    if tensor.dtype not in dtypes or tensor.layout is not _torch.strided:
        choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}, {tensor.layout}; it must be dense {choices}.")
    if tensor.device.type not in (("cpu", "cuda") if _HAS_GPU else ("cpu",)):
        where = "the CPU and on CUDA devices" if _HAS_GPU else "the CPU"
        raise ValueError(f"{name} is on {tensor.device}; these kernels run on {where}: use .cpu().")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensor on {beside.device}.")
    if tensor.numel() > _MAX_NUMEL:
        raise ValueError(f"{name} has {tensor.numel()} elements; at most {_MAX_NUMEL}.")


def _scratch(num_bytes):
    """Memory for one call; each thread keeps the largest it was asked for."""
    held = getattr(_local, "scratch", None)
    if held is None or held.nbytes < num_bytes:
        held = _local.scratch = np.empty(max(num_bytes, 65_536), np.uint8)
    return held


def _empty_frame(x, floats):
    """Stands for `encode` while torch.compile traces."""
    return x.new_empty(_wire_bytes(x.numel(), floats), dtype=_torch.uint8)


def _empty_gradient(payload, numel):
    """Stands for `decode` while torch.compile traces."""
    return payload.new_empty(numel, dtype=_torch.float32)
'''
"""Closes wrapper.py. The header is that of a frame of one body (hipress.codecs.frame), its table
included; tests hold the two against each other."""

GPU_SUPPORT = '''

def _on_gpu(tensor):
    return tensor.is_cuda


@functools.cache
def _kernels(name):
    """Starts the kernels of encode, decode or decode_add; Triton is imported here."""
    try:
        module = importlib.import_module(".body_gpu", __package__)
    except ImportError as error:
        raise ValueError(
            f"a CUDA tensor needs Triton, which cannot be imported ({error}); install it with "
            "pip install triton, or use .cpu()."
        ) from error
    return _launch().Kernels(module, name)


def _launch():
    return importlib.import_module(".launch", __package__)


def _encode_on_gpu(x, states, rng, floats, ours, frame):
    device, numel = x.device, x.numel()
    _raise_damage(device)
    if not numel:
        frame.zero_()
        frame[: _HEAD.size] = _torch.frombuffer(bytearray(_head(0, floats)), dtype=_torch.uint8)
        frame[8:12].view(_torch.int32).fill_((rng[2] + 2**31) % 2**32 - 2**31)
        return
    ratio = ours[-1] if _HAS_RATIO else 1.0
    ours = (*ours[:-1], 1.0) if _HAS_RATIO else ours  # kernels read it from memory
    params = tuple(float((*floats, *ours)[k]) for k in _ENCODE)
    # Filled, not copied: nothing waits, and a CUDA graph can capture it.
    drawn = [(number + 2**63) % 2**64 - 2**63 for number in rng]
    drawn = [_torch.full((1,), number, dtype=_torch.int64, device=device) for number in drawn]
    ratio = _torch.full((1,), ratio, dtype=_torch.float32, device=device)
    memory = [x.detach().float().contiguous().view(-1), *states]
    _start("encode", numel, params, (frame, memory), floats, drawn, ratio)


def _decode_on_gpu(name, payload, out, alpha, floats):
    device, numel = out.device, out.numel()
    _raise_damage(device)
    if numel:
        params = tuple(float((*floats, alpha)[k]) for k in _DECODE)
        _start(name, numel, params, (payload, [out]), floats)


def _start(name, numel, params, memory, floats, *more):
    def describe():
        gradient = _launch().Gradient(numel, params, _HEAD.size)
        return [gradient], [bytes(_head(numel, floats))]

    kernels, device = _kernels(name), memory[0].device
    sizes = kernels.sizes((numel, params, floats), device, describe)
    kernels(sizes, *memory, _error_word(device), *more)


@functools.cache
def _error_word(device):
    """Set by kernels where a payload is damaged; in memory that the host can read."""
    return _torch.zeros(1, dtype=_torch.int32, pin_memory=device.type == "cuda")


def _raise_damage(device):
    word = _error_word(device)
    found = int(word[0])
    if found:
        word[0] = 0
        reason = _kernels("decode").refusals[found - 1]
        raise ValueError(
            f"a payload that was decoded on {device} before is damaged: {reason}; what was decoded "
            "since then must not be used."
        )
'''
"""Closes wrapper.py: what a call on a GPU does. Kernels, sizes and headers are made once."""

REGISTRATION = '''\
"""{title}: torch operators, {mark}: edit the program, not this file.

Importing this package registers torch.ops.hipress.{name}_encode, {name}_decode and
{name}_decode_add. The functions here call them, and work under torch.compile.
"""

import torch as _torch

from . import wrapper as _wrapper

wire_bytes = _wrapper.wire_bytes
'''
"""Opens __init__.py."""

OPERATOR = '''

@_torch.library.custom_op("hipress::{op}", mutates_args={mutates})
def _{name}(
{op_args}) -> {returns}:
    return _wrapper.{name}({to_wrapper})


@_{name}.register_fake
def _(
{fake_args}):
    {fake}


def {name}(
{args}) -> {returns}:
    """{about}"""
    return _{name}({to_op})
'''
"""One operator of __init__.py and the function that calls it."""
