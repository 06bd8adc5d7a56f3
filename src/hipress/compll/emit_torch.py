"""The fixed text of packages for torch: what stands around the functions that `emit` writes."""

from __future__ import annotations

WRAPPER_HEAD = '''\
"""{title}: functions on torch tensors, {mark}: edit the program, not this file.

`encode` makes a HiPress frame (a header of 80 bytes, then the body) that `hipress.codec` of the
same program reads, and the other way round. One thread works on a call.
"""

import hashlib
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
'''
"""Opens wrapper.py. _VALUES: parameters in order, None for floats; _ENCODE, _DECODE: which of the
floats a kernel takes (alpha, mu and lr_ratio come last)."""

SUPPORT = '''

_HEAD = struct.Struct("<4sHHQIIQQIIIIQQQ")
_MAX_NUMEL = 2**32 - 1
_local = threading.local()


def _encode(x, states, rng, floats, ours):
    _check("x", x, _torch.float32, _torch.float16, _torch.bfloat16)
    numel = x.numel()
    arrays = []
    for name, held in states:
        _check(name, held, _torch.float32)
        if held.numel() != numel or not held.is_contiguous():
            raise ValueError(
                f"{name} has {held.numel()} elements in strides {held.stride()}; x needs {numel}, "
                "contiguous."
            )
        arrays.append(held.detach().view(-1).numpy())
    seed, stream, step = rng
    rng = seed % 2**64, stream % 2**32, step % 2**32
    frame = _torch.empty(_wire_bytes(numel, floats), dtype=_torch.uint8)
    data = frame.numpy()
    body = data[_HEAD.size :]
    flags = 0
    if numel:
        flat = x.detach().float().contiguous().view(-1).numpy()
        params = tuple(float((*floats, *ours)[k]) for k in _ENCODE)
        flags = int(_body.encode(numel, params, rng, body, flat, arrays, _scratch))
    else:
        body[:] = 0
    fields = [b"HiPF", 1, flags, rng[2], 0, 1, _hash(floats), data.size, 0, 0, 0, 0, 0, numel]
    fields.append(body.size)
    fields[4] = zlib.crc32(_HEAD.pack(*fields)[20:])
    _HEAD.pack_into(data, 0, *fields)
    return frame


def _decode(payload, numel, alpha, floats):
    if not 0 <= numel <= _MAX_NUMEL:
        raise ValueError(f"numel is {numel}; a frame holds 0 to {_MAX_NUMEL} elements.")
    out = _torch.empty(numel, dtype=_torch.float32)
    _decode_into(_body.decode, payload, out, alpha, floats)
    return out


def _decode_into(kernel, payload, out, alpha, floats):
    _check("out", out, _torch.float32)
    if not out.is_contiguous():
        raise ValueError("out is not contiguous; decode into a contiguous tensor and copy.")
    out = out.detach().view(-1)
    body, nonfinite = _open(payload, out.numel(), floats)
    if nonfinite:
        out.fill_(float("nan"))
    elif out.numel():
        params = tuple(float((*floats, alpha)[k]) for k in _DECODE)
        refusal = kernel(out.numel(), params, (0, 0, 0), body, out.numpy(), _scratch)
        if refusal is not None:
            raise ValueError(f"the payload is damaged: {refusal}; send it again.")


def _open(payload, numel, floats):
    """The body of a frame, and whether its gradient had a NaN or Inf; all but ours is refused."""
    _check("payload", payload, _torch.uint8)
    size = _wire_bytes(numel, floats)
    if payload.dim() != 1 or payload.numel() != size:
        raise ValueError(
            f"the payload has {payload.numel()} bytes in {payload.dim()} dimensions; that of "
            f"{numel} elements has {size} in one."
        )
    payload = payload.detach().contiguous()
    if payload.data_ptr() % 16:  # kernels read words from it
        payload = payload.clone()
    data = payload.numpy()
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
    digest = hashlib.blake2b(repr((PROGRAM, values, 1)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _wire_bytes(numel, floats):
    return _HEAD.size + _body.body_bytes(numel, tuple((*floats, 0.0)[k] for k in _ENCODE))


def _check(name, tensor, *dtypes):
    if tensor.dtype not in dtypes or tensor.layout is not _torch.strided:
        choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}, {tensor.layout}; it must be dense {choices}.")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; these kernels run on the CPU: use .cpu().")
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
