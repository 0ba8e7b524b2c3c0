"""A stand-in for CUDA: tensors that say they are on ``cuda`` and are computed on the CPU, and count what would wait.

Inside :func:`stand_in_cuda` a machine without a GPU runs the branches that a GPU would take, with real numbers. Every
operation that makes the host wait for a GPU is noted with the line that asked for it: reading a number, a copy to the
host, a copy from memory that is not pinned, an operation whose result's shape depends on the data, a wait for an event
or a stream. A copy to pinned memory arrives late, as on a GPU: its numbers are poison until an event after it, or its
stream, was waited for. Tensors of both devices in one operation are refused as CUDA refuses them.

What it cannot show: kernels, the order of work on several streams, and memory that the allocator hands out again.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from meshwright.loss import lazy_logits
from meshwright.methods.tensor import axis_exchange
from meshwright.planner.trace import aten_kernels, model_state

_aten = torch.ops.aten
_THROUGH = ("stand_in_cuda", "_python_dispatch", "eval_frame", "_compile.py", "_ops.py", "autograd/function.py")
_SOURCE = str(Path(__file__).parents[1] / "src")
# The shape of the result is in the data, so the host waits for it.
_SHAPED_BY_DATA = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "argwhere", "bincount"}
_READS = {"_local_scalar_dense", "equal", "is_nonzero"}
# Both devices may meet in these.
_ACROSS = {"copy_", "_to_copy", "_foreach_copy_", "set_", "resize_", "is_pinned", "_pin_memory"}


_make_wrapper = torch.Tensor._make_wrapper_subclass


def _wrapper_on_cpu(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
    """Let C++ take other packages' wrappers to be on the CPU, too."""
    return _make_wrapper(cls, *args, device=torch.device("cpu") if _is_cuda(device) else device, **options)


class CudaTensor(torch.Tensor):
    """A tensor on the stand-in's device; ``elem`` is what it holds, on the CPU."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> CudaTensor:
        made = _make_wrapper(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
            layout=elem.layout, device=torch.device("cpu"), requires_grad=False,
        )  # fmt: skip
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", _Device.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return _Across.apply(self, torch.device("cpu"), False)

    def record_stream(self, stream: Any) -> None:
        """Do nothing: nothing is handed out again here."""

    def tolist(self) -> Any:
        _note("tolist")
        return self.elem.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def untyped_storage(self) -> Any:
        return self.elem.untyped_storage()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.elem!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_rebuilt, (self.elem, self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = CudaTensor(self.elem.clone())
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "elem"})
        memo[id(self)] = copied
        return copied.requires_grad_(self.requires_grad)


_plain_data = torch._C.TensorBase.data


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor change its device with its data, as torch's can."""
    if isinstance(self, CudaTensor) != isinstance(value, CudaTensor):
        fresh = CudaTensor(value.elem) if isinstance(value, CudaTensor) else value.detach()
        fresh.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            fresh = torch.nn.Parameter(fresh, self.requires_grad)
        fresh.__dict__.update({key: each for key, each in vars(self).items() if key != "elem"})
        torch.utils.swap_tensors(self, fresh)
        return
    _plain_data.__set__(self, value)
    if isinstance(value, CudaTensor):
        self.elem = value.elem  # type: ignore[attr-defined]


def _rebuilt(elem: torch.Tensor, requires_grad: bool) -> CudaTensor:
    return CudaTensor(elem).requires_grad_(requires_grad)


class _Device:
    index = 0
    makes_buckets = False  # DDP makes its buckets in C++, on the device that it takes the tensors to be on
    ledger: Ledger | None = None
    pending: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []  # copies to the host that have not arrived
    pinned: ClassVar[dict[int, Any]] = {}  # storages


@dataclass
class Ledger:
    """What would have made the host wait: operation and the line of the package that asked for it."""

    found: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, what: str) -> None:
        self.found[what, _place()] += 1


def _place() -> str:
    """The innermost line of the package on the stack, and, where it is deeper, that of torch."""
    frame, deepest = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        here = f"{Path(name).name}:{frame.f_code.co_name}"
        if name.startswith(_SOURCE) and not name.endswith("runtime/device.py"):
            return f"{Path(name).relative_to(_SOURCE)}:{frame.f_code.co_name}" + (f" < {deepest}" if deepest else "")
        if not deepest and not any(each in name for each in (*_THROUGH, "runtime/device.py")):
            deepest = here
        frame = frame.f_back  # type: ignore[assignment]
    return deepest


def _is_from_the_engine() -> bool:
    """Return whether autograd's engine asks, in C++: it takes the tensors to be on the CPU, as C++ is told."""
    frame = sys._getframe(1)
    while frame is not None and any(each in frame.f_code.co_filename for each in _THROUGH):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _note(what: str) -> None:
    if Graph.capturing is not None:
        raise RuntimeError(f"stand-in: operation not permitted when stream is capturing ({what})")
    if _Device.ledger is not None:
        _Device.ledger.note(what)


def _arrive() -> None:
    with torch.no_grad():
        for target, value in _Device.pending:
            target.copy_(value)
    _Device.pending.clear()


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _Device.pinned


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _Device.pinned[storage._cdata] = storage
    return tensor


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation, and take it up in a graph that is being recorded."""
    graph = Graph.capturing
    if graph is None:
        return _run(func, args, kwargs)
    graph.keep(args, kwargs)
    out = _run(func, args, kwargs)
    graph.note(func, args, kwargs, out)
    return out


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on what its tensors hold, note whether it waits, and wrap its results."""
    name = func._schema.name.split("::")[-1]
    if "device" in kwargs and (_Device.makes_buckets or _is_from_the_engine()):
        kwargs = {**kwargs, "device": torch.device("cuda", _Device.index)}
    flat, spec = tree_flatten((args, kwargs))
    on_device = [each for each in flat if isinstance(each, CudaTensor)]
    on_host = [each for each in flat if isinstance(each, torch.Tensor) and not isinstance(each, CudaTensor)]
    special = _SPECIAL.get(name)
    if special is not None:
        answer = special(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
    made_on_device = "device" in kwargs and _is_cuda(kwargs["device"])
    if not on_device and not made_on_device:
        if kwargs.get("pin_memory"):
            return _pin(func(*args, **{**kwargs, "pin_memory": None}))
        return func(*args, **kwargs)
    if on_device:
        _check_waits(func, name, args, on_host)
    mapping = {id(each.elem): each for each in on_device}
    inner = [each.elem if isinstance(each, CudaTensor) else each for each in flat]
    inner_args, inner_kwargs = tree_unflatten(inner, spec)
    target = kwargs.get("device") if name != "_to_copy" else None  # torch itself asks for a type alone
    if "device" in inner_kwargs:
        inner_kwargs["device"] = torch.device("cpu") if target is not None else None
    if "pin_memory" in inner_kwargs:
        inner_kwargs["pin_memory"] = None
    out = func(*inner_args, **inner_kwargs)
    if target is not None and not made_on_device:
        return _pin(out) if kwargs.get("pin_memory") else out

    def wrapped(value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return value
        return mapping[id(value)] if id(value) in mapping else CudaTensor(value)

    answer = tree_map(wrapped, out)
    if func.namespace != "aten" or name.startswith("_foreach"):
        return answer
    return return_and_correct_aliasing(func, args, kwargs, answer)


def _check_waits(func: Any, name: str, args: Any, on_host: list[torch.Tensor]) -> None:
    if name in _READS or name in _SHAPED_BY_DATA or (name == "repeat_interleave" and len(args) < 2):
        _note(name)
    elif name in ("index", "index_put_", "index_put", "_index_put_impl_"):
        if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
            _note(f"{name} by a mask")
        elif any(each is not None and not isinstance(each, CudaTensor) for each in args[1]):
            _note(f"{name} by a tensor of the host")
        return
    if name not in _ACROSS and func.namespace == "aten" and any(each.dim() for each in on_host):
        raise RuntimeError(f"stand-in: {func} was given tensors of the host and of the device at once")


class _Across(torch.autograd.Function):
    """A copy between the devices."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, device: torch.device, is_late: bool) -> torch.Tensor:
        ctx.device, ctx.is_late = given.device, is_late
        return _moved(given, device, is_late)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _moved(gradients[0], ctx.device, ctx.is_late), None, None


def _moved(given: torch.Tensor, device: torch.device, is_late: bool) -> torch.Tensor:
    if isinstance(given, CudaTensor):
        _check_to_host(is_late)
        made = given.elem.clone()
        return _late(_pin(torch.empty_like(made)), made) if is_late else made
    _check_from_host(given, is_late)
    return CudaTensor(given.detach().clone())


def _copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    is_late = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    to_device, from_device = isinstance(target, CudaTensor), isinstance(source, CudaTensor)
    if to_device == from_device:
        return NotImplemented
    if to_device:
        if not _is_from_the_engine():  # DDP takes sums out of what the collective was given
            _check_from_host(source, is_late)
        target.elem.copy_(source)
        return target
    arrives_late = is_late and _is_pinned(target)
    _check_to_host(arrives_late)
    if arrives_late:
        return _late(target, source.elem.clone())
    return target.copy_(source.elem)


def _late(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Poison what a copy is on its way to."""
    with torch.no_grad():
        target.fill_(float("nan") if target.is_floating_point() else 99)
    _Device.pending.append((target, value))
    return target


def _foreach_copy_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source, *args[2:], **kwargs)


def _check_to_host(is_late: bool) -> None:
    if not is_late:
        _note("copy to the host")
        _arrive()


def _check_from_host(source: torch.Tensor, is_late: bool) -> None:
    if any(target.untyped_storage()._cdata == source.untyped_storage()._cdata for target, _ in _Device.pending):
        _arrive()  # streams keep the order of copies to the host and back
    if not is_late:
        _note("copy from the host")
    elif not _is_pinned(source):
        _note("late copy from memory that is not pinned")


def _answer_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return not isinstance(args[0], CudaTensor) and _is_pinned(args[0])


def _pin_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _pin(args[0].clone())


def _math(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return 0


def _mm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """CUDA's product of halves that is kept as it was summed."""
    if func._overloadname != "dtype" or not isinstance(args[0], CudaTensor):
        return NotImplemented
    left, right = _elems(*args[:2])
    return CudaTensor(left.to(args[2]) @ right.to(args[2]))


def _efficient_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """CUDA's memory-efficient kernel, whose log-sum-exp is padded to 32 rows, by the CPU's."""
    query, key, value, bias, _, dropout, is_causal = (*args, *(0.0, False)[len(args) - 5 :])
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_elems(query, key, value), dropout, is_causal, attn_mask=_elems(bias)[0], scale=kwargs.get("scale")
    )
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return *map(CudaTensor, (out, lse)), torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_attention_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    gradient, query, key, value, bias, out, lse = _elems(*args[:7])
    is_causal = args[11] if len(args) > 11 else False
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, lse[..., : query.shape[2]].contiguous(), args[9], is_causal,
        attn_mask=bias, scale=kwargs.get("scale"),
    )  # fmt: skip
    return *map(CudaTensor, grads), None


def _elems(*tensors: Any) -> list[Any]:
    return [each.elem if isinstance(each, CudaTensor) else each for each in tensors]


_SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": _copy_, "_foreach_copy_": _foreach_copy_, "is_pinned": _answer_pinned,
    "_pin_memory": _pin_memory, "_fused_sdp_choice": _math, "mm": _mm,
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}  # fmt: skip


def _is_fake(types: Any) -> bool:
    """Return whether a tensor or the mode is one of those without numbers, which are tried after this mode."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None or any(issubclass(each, FakeTensor) for each in types)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_fake(types):
            return func(*args, **(kwargs or {}))
        if any(each not in (torch.Tensor, CudaTensor, torch.nn.Parameter, torch.nn.Buffer) for each in types):
            return NotImplemented  # a DTensor takes itself apart first
        return run(func, args, kwargs or {})


# --- torch.cuda


class Stream:
    """A stream on which everything is done at once."""

    device_index, stream_id, device_type = 0, 0, 1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", _Device.index)

    def synchronize(self) -> None:
        _note("wait for a stream")
        _arrive()

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event; waiting for it lets copies arrive."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._step = _Device.ledger

    def record(self, stream: Any = None) -> None:
        self._step = _Device.ledger

    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Let copies arrive; the device is past what an earlier step has recorded."""
        if self._step is _Device.ledger:
            _note("wait for an event")
        _arrive()

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Graph:
    """A CUDA graph: operations that are run again on the same memory.

    A GPU runs nothing while it records. Here it is run, and what it wrote into older memory is put back afterwards.
    """

    capturing: ClassVar[Graph | None] = None

    def __init__(self, **_: Any) -> None:
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # storages of results
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # older memory, and a copy of it

    def keep(self, *given: Any) -> None:
        """Copy what an operation may write to."""
        for storage, tensor in _storages(given).items():
            if storage not in self._made and storage not in self._before:
                flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self._before[storage] = flat, flat.clone()

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take an operation up that was run."""
        self._made |= _storages(out).keys() - _storages((args, kwargs)).keys()
        self._operations.append((func, args, kwargs, out))

    def put_back(self) -> None:
        """Undo what the recording has done."""
        for flat, before in self._before.values():
            flat.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Run all operations again, into the memory in which their results were."""
        with torch.no_grad():
            for func, args, kwargs, out in self._operations:
                given, again = _storages((args, kwargs)), _run(func, args, kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.untyped_storage()._cdata not in given:
                        old.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return _elems(*(each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)))


def _storages(tree: Any) -> dict[int, torch.Tensor]:
    return {each.untyped_storage()._cdata: each for each in _tensors(tree)}


@contextlib.contextmanager
def _capture(graph: Graph, **_: Any) -> Iterator[None]:
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None
        with torch.no_grad():
            graph.put_back()


@contextlib.contextmanager
def _of_stream(stream: Any) -> Iterator[None]:
    yield


def _synchronize(device: Any = None) -> None:
    _note("wait for the device")
    _arrive()


def _patches(local_rank: int) -> dict[str, Any]:
    current = Stream()
    properties = types.SimpleNamespace(
        name="Stand-in", total_memory=2**34, multi_processor_count=1, major=9, minor=0, L2_cache_size=2**20
    )
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 8, "current_device": lambda: local_rank, "set_device": lambda device: None,
        "Stream": Stream, "Event": Event, "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current, "stream": _of_stream, "set_stream": lambda stream: None,
        "synchronize": _synchronize, "get_device_name": lambda device=None: "Stand-in",
        "get_device_capability": lambda device=None: (9, 0), "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (2**34, 2**34), "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {}, "empty_cache": lambda: None,
        "get_per_process_memory_fraction": lambda device=None: 1.0, "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None, "get_rng_state": lambda device=None: state.clone(),
        "set_rng_state": lambda new, device=None: None, "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: Graph.capturing is not None, "_sleep": lambda cycles: None,
        "CUDAGraph": Graph, "graph": _capture,
    }  # fmt: skip


def _built(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make tensors from Python's numbers as torch does: on the host, then copied, which waits."""

    def build(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        device = torch.get_default_device() if device is None else device
        if not _is_cuda(device):
            more = {"requires_grad": True} if requires_grad else {}
            return make(data, *args, device=device, **options, **more)
        return make(data, *args, device="cpu", **options).to(device).requires_grad_(requires_grad)

    return build


_plain_autocast = torch.autocast.__init__


def _autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    _plain_autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _of_cpu(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *kind: ask(*("cpu" if each == "cuda" else each for each in kind))


_plain_to = torch.Tensor.to


def _indexed(value: Any) -> Any:
    """Give a device of CUDA its index, for which torch would ask CUDA."""
    is_bare = isinstance(value, str | torch.device) and torch.device(value) == torch.device("cuda")
    return torch.device("cuda", _Device.index) if is_bare else value


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Copy between the devices, of which torch knows one alone."""
    if isinstance(self, FakeTensor) or _is_fake(()):
        return _plain_to(self, *map(_indexed, args), **{name: _indexed(value) for name, value in kwargs.items()})
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device = kwargs.pop("device", None)
    if device is None and args and isinstance(args[0], str | int | torch.device):
        device, *args = args  # type: ignore[assignment]
    is_late = bool(kwargs.get("non_blocking", False))
    for given in args:
        is_late = is_late or given is True
    if device is not None and not isinstance(self, DTensor):
        device = torch.device(device)
        if _is_cuda(device) != isinstance(self, CudaTensor) and device.type != "meta":
            self = _Across.apply(self, device, is_late)
        elif device.type == "meta":
            return _plain_to(self, device, *args, **kwargs)
    elif device is not None and _is_cuda(device) != _is_cuda(self.device):
        raise NotImplementedError("stand-in: a DTensor between devices")
    dtype = next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
    shape = kwargs.get("memory_format")
    more = {} if shape is None else {"memory_format": shape}
    return _plain_to(self, dtype or self.dtype, copy=bool(kwargs.get("copy")), **more)


def _grouping(group: Callable[..., Any]) -> Callable[..., Any]:
    """Tell optimizers the device, of which C++ knows nothing."""

    def grouping(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices)
        return {(own[0][0][0].device, dtype): own for (_, dtype), own in found.items()}

    return grouping


def _making_buckets(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _Device.makes_buckets = True
        try:
            return function(*args, **kwargs)
        finally:
            _Device.makes_buckets = False

    return call


@contextlib.contextmanager
def stand_in_cuda(local_rank: int = 0) -> Iterator[None]:
    """Make this process believe that it has GPUs."""
    _Device.index = local_rank
    with contextlib.ExitStack() as stack:
        for name, value in _patches(local_rank).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()))
        # Traces hold tensors without numbers, whose autograd would ask CUDA: they run as on a machine without it.
        for module in (lazy_logits, axis_exchange):
            stack.enter_context(mock.patch.object(module, "make_wrapper", _wrapper_on_cpu))
        for module in (aten_kernels, model_state):
            stack.enter_context(mock.patch.object(module, "device_here", return_value=torch.device("cpu")))
        for name in ("_ddp_init_helper", "_pre_forward"):
            function = getattr(DistributedDataParallel, name)
            stack.enter_context(mock.patch.object(DistributedDataParallel, name, _making_buckets(function)))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _built(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _to))
        grouped = torch._C._group_tensors_by_device_and_dtype
        stack.enter_context(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", _grouping(grouped)))
        data = property(_plain_data.__get__, _set_data)
        stack.enter_context(mock.patch.object(torch.Tensor, "data", data))
        wrapper = staticmethod(_wrapper_on_cpu)
        stack.enter_context(mock.patch.object(torch.Tensor, "_make_wrapper_subclass", wrapper))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self.to("cuda")))
        stack.enter_context(mock.patch.object(DTensor, "device", property(lambda self: self._local_tensor.device)))
        stack.enter_context(mock.patch.object(DTensor, "is_cuda", property(lambda self: self._local_tensor.is_cuda)))
        stack.enter_context(mock.patch.object(torch.autocast, "__init__", _autocast))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, _of_cpu(getattr(torch, name))))
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.callback(_Device.pending.clear)
        stack.callback(_Device.pinned.clear)
        stack.enter_context(_Mode())
        yield


@contextlib.contextmanager
def counted() -> Iterator[Ledger]:
    """Count what would wait inside the block."""
    before, _Device.ledger = _Device.ledger, Ledger()
    try:
        yield _Device.ledger
    finally:
        _Device.ledger = before


__all__ = ["CudaTensor", "Ledger", "counted", "dist", "stand_in_cuda"]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers on the host, outside a stand-in's world, too."""
    return tensor.elem.clone() if isinstance(tensor, CudaTensor) else tensor
