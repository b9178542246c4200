"""Pretend CUDA devices: tensors that say they are there, and refuse to meet those of others.

They are tensors of the CPU, marked in Python, so no driver and no compiler is needed. What two
devices would refuse raises `MixedDevices`; times, streams and memory are not pretended. Where the
host would wait for a device is counted, by place in the code, and what moves between two of them.
"""

import os
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import cache
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

TYPE, MEMORY = "cuda", 1 << 34
_MOVES = {
    *(torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.cpu, torch.Tensor.cuda),
    torch._has_compatible_shallow_copy_type,
}
_TAKE_INDICES = {
    *(torch.Tensor.__getitem__, torch.Tensor.__setitem__),
    *(torch.Tensor.index_put, torch.Tensor.index_put_, torch.Tensor.type_as),
}
"""Indices may be of the CPU; and what is set may be, as it is copied."""
_READS = {
    *("item", "tolist", "cpu", "nonzero", "masked_select", "multinomial", "equal", "unique"),
    *("bincount", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
}
"""The host needs what the device has; `multinomial` checks its weights on the host."""
_MAKE = {torch.tensor, torch.as_tensor}
"""What they make on the host is copied, and the copy is waited for."""


class MixedDevices(RuntimeError):
    """An operation was given tensors of both."""


class OnDevice(torch.Tensor):
    """A tensor that says it is on the first device; subclasses are of others."""

    gpu = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


@cache
def kind(index):
    """The tensors of a device."""
    return OnDevice if index == 0 else type(f"OnDevice{index}", (OnDevice,), {"gpu": index})


class QueueEvent:
    """An event of a stream in which each piece of work between two of them takes 250 ms."""

    recorded = 0

    def __init__(self, enable_timing):
        self.at = 0

    def record(self):
        QueueEvent.recorded += 1
        self.at = QueueEvent.recorded

    def synchronize(self):
        """All is done."""

    def elapsed_time(self, other):
        return 250.0 * (other.at - self.at)


class PretendDevice(TorchFunctionMode):
    """Within, what names the device makes tensors on it.

    Attributes:
        waits: How often the host would have waited, by line of the product and name of the call.
        moves: How often a tensor of one device was copied to another, by line of the product.
        most_read: Numbers of the largest tensor that the host has waited for.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.moves = Counter(), Counter()
        self.most_read = 0
        self._patches = ExitStack()

    def __enter__(self):
        self._patches.enter_context(patch("torch.cuda.Event", QueueEvent))
        overwrites = "torch.__future__._overwrite_module_params_on_conversion"
        self._patches.enter_context(patch(overwrites, True))  # so `module.to` changes their class
        self._patches.enter_context(patch("torch.cuda.synchronize", lambda *_: None))
        self._patches.enter_context(patch("torch.mps.synchronize", lambda: None))
        self._patches.enter_context(patch("torch.cuda.get_device_capability", lambda *_: (8, 0)))
        self._patches.enter_context(patch("torch.cuda.mem_get_info", lambda *_: (MEMORY, MEMORY)))
        self._patches.enter_context(patch("torch.cuda.current_device", lambda: 0))
        self._patches.enter_context(patch("torch.cuda.device", nullcontext))
        one_thread = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}  # others do not know of pretended devices
        self._patches.enter_context(patch.dict(os.environ, one_thread))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if _waits(function, args, kwargs or {}):
            self.waits[f"{_place()} {function.__name__}"] += 1
            if isinstance(args[0], OnDevice):
                self.most_read = max(self.most_read, args[0].numel())
        out = _run(function, args, kwargs or {})
        if function in _MOVES and isinstance(out, OnDevice):
            source = args[1] if function is torch.Tensor.copy_ else args[0]
            if isinstance(source, OnDevice) and source.gpu != out.gpu:
                self.moves[_place()] += 1
        return out


class AppleDevice(PretendDevice):
    """Apple's GPU, where `TYPE` is "mps": it refuses float64, as the real one does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, OnDevice) and tensor.dtype == torch.float64:
                raise TypeError("the MPS framework doesn't support float64")
        return out


def move(module, index=0):
    """Put all parameters and buffers of a module on a device."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _marked(tensor, index)
        for name, value in vars(part).items():
            if type(value) is torch.Tensor:
                setattr(part, name, _marked(value, index))
    return module


def _marked(tensor, index):
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    marked = tensor.detach().as_subclass(kind(index))
    return torch.nn.Parameter(marked, tensor.requires_grad) if is_parameter else marked


def _waits(function, args, kwargs):
    """Whether CUDA would keep the host until the device has done all that it was asked to."""
    name, is_there = getattr(function, "__name__", ""), [isinstance(a, OnDevice) for a in args]
    if name in _READS or _is_copied_out(function, args):
        return any(is_there)
    if function in _MAKE or function is torch.Tensor.to:
        named = _named_device(function, args, kwargs)[0]
        if function is torch.Tensor.to and is_there[0]:
            return named == "cpu"
        return isinstance(named, int) and not kwargs.get("non_blocking")
    if function is torch.Tensor.copy_ and is_there[0] != is_there[1]:
        return is_there[1] or not kwargs.get("non_blocking")
    if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and is_there[0]:
        indices = args[1] if isinstance(args[1], tuple) else args[1:2]
        return any(map(_is_copied, args[2:])) or any(map(_is_awaited, indices))
    return False


def _is_awaited(index):
    """Lists and tensors of the host are copied first; the size of a mask's choice is read."""
    if isinstance(index, torch.Tensor):
        return not isinstance(index, OnDevice) or index.dtype == torch.bool
    return isinstance(index, list | np.ndarray)


def _is_copied_out(function, args):
    """What is set into memory of the host is copied, where no tensor names its place."""
    if function is not torch.Tensor.__setitem__ or isinstance(args[0], OnDevice):
        return False
    indices = args[1] if isinstance(args[1], tuple) else args[1:2]
    return isinstance(args[2], OnDevice) and not any(isinstance(i, torch.Tensor) for i in indices)


def _is_copied(value):
    return isinstance(value, torch.Tensor) and not isinstance(value, OnDevice)


def _place():
    """The innermost line of the product."""
    frame = sys._getframe(2)
    while frame is not None and "/src/buddy/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.partition('/src/')[2]}:{frame.f_lineno}"


def _run(function, args, kwargs):
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    here = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
    name = getattr(function, "__name__", "")
    if name == "__get__" and function == torch.Tensor.device.__get__:
        with torch._C.DisableTorchFunctionSubclass():  # that of others may be meta
            return torch.device(TYPE, there[0].gpu) if there else function(*args)
    if function is torch.Tensor.numpy and there:
        raise MixedDevices("numpy reads no memory of the device")
    named, args, kwargs = _named_device(function, args, kwargs)
    if there and function not in _MOVES:
        others = [t for t in here if _shape(t)]
        takes = function in _TAKE_INDICES and isinstance(args[0], OnDevice)
        if others and not takes and not _is_copied_out(function, args):
            raise MixedDevices(f"{name} of tensors of both devices: {list(map(_shape, others))}")
        if len({tensor.gpu for tensor in there}) > 1:
            raise MixedDevices(f"{name} of tensors of two GPUs: {list(map(_shape, there))}")
    with torch._C.DisableTorchFunctionSubclass():
        if function is torch.histc and there:  # of whole numbers, which the CPU has not
            args = (args[0].float(), *args[1:])
        out = function(*args, **kwargs)
    made = args[:1] if function is torch.Tensor.copy_ else there
    index = next((tensor.gpu for tensor in made if isinstance(tensor, OnDevice)), None)
    if function is torch.Tensor.cpu:
        index = None
    if named is not None:
        index = None if named == "cpu" else named

    def mark(value):
        if not isinstance(value, torch.Tensor) or getattr(value, "gpu", None) == index:
            return value
        if isinstance(value, OnDevice) and index is not None:
            value = value.clone()  # in the other's memory
        return value.as_subclass(torch.Tensor if index is None else kind(index))

    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(mark, out)


def _shape(tensor):
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.shape)


def _named_device(function, args, kwargs):
    """The device that a call names, and the call without it."""

    def device_of(value):
        if not isinstance(value, str | torch.device):
            return None
        name, _, index = str(value).partition(":")
        if name in ("cuda", "mps"):
            return int(index or 0)
        return "cpu" if name == "cpu" else None  # "meta" stays what it is

    named = device_of(kwargs.get("device"))
    if named is not None:
        kwargs = {**kwargs, "device": "cpu"}
    if function is torch.Tensor.to:
        for place, value in enumerate(args[1:], 1):
            if (device := device_of(value)) is not None:
                named, args = device, (*args[:place], "cpu", *args[place + 1 :])
    return named, args, kwargs
