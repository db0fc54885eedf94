"""Calls of a Hugging Face tower as CUDA graphs: a size that comes again is replayed in one launch.

32 layers are hundreds of kernels, which over small images the host takes longer to launch than the
GPU to run (compare/results/notes/host.md). A recording reads parameters where they lie. So it
counts only while the tower is what it was when it was recorded, and nobody wants to see the calls
of its layers. Every call asks for that, while the GPU works.
"""

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from triton_kernels.integrations.forms import foreign_home
from triton_kernels.integrations.layers import StandIn
from triton_kernels.integrations.recorder import Recorder, can_record
from triton_kernels.launching.fast_path import goes_unseen

# A planned call's argument where it was given patches and a grid alone: the grid's numbers.
PLANNED = "planned_grid"

# Longer calls keep the GPU busy without it, and a recording would keep their memory.
_MOST_TOKENS = 1 << 13
# To record takes as long as several calls: only what has come often among the last sizes.
_SIZES = 8
_CALLS = 3

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_TENSORS = (torch.Tensor, nn.Parameter)


class ReplayedTower(StandIn):
    """A tower whose planned calls are replayed, shown as what it stands in for.

    Models write the names of their classes into their configurations.

    Attributes:
        recordings: what has been recorded of its calls.
    """

    recordings: "Recordings"

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a stand-in its tower's names and signature."""
        super().__init_subclass__(**options)
        if "own_class" not in vars(cls):  # another library's, derived from it
            return
        own = cls.own_class
        for name in ("__name__", "__qualname__", "__module__"):
            setattr(cls, name, getattr(own, name))

        @functools.wraps(own.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            grid = kwargs.pop(PLANNED, None)
            run = functools.partial(own.forward, self)
            if grid is None or torch.compiler.is_compiling():
                return run(*args, **kwargs)
            return self.recordings.call(self, run, grid, *args, kwargs)

        cls.forward = forward


class Recordings:
    """What has been recorded of one tower's calls.

    Threads and streams may call at once. Their replays run one after the other, because all
    recordings work in the same memory: that of the largest, not the sum of all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: _State | None = None
        self._recorder: Recorder | None = None
        # How often a size has come, or what it became; the one that came last is the last.
        self._sizes: OrderedDict[Hashable, int | _Recording] = OrderedDict()

    def __reduce__(self) -> tuple[type, tuple]:
        """A copy of a tower, in this process or another, records for itself."""
        return type(self), ()

    def __len__(self) -> int:
        """The number of recordings."""
        return sum(isinstance(x, _Recording) for x in self._sizes.values())

    def call(
        self,
        tower: nn.Module,
        run: Callable,
        grid: Hashable,
        patches: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> Any:
        """Replay a call, or make it.

        Args:
            tower: whose call it is.
            run: its own forward.
            grid: the images' sizes, from which all of the call but the patches follows.
            patches: [tokens, channels].
            kwargs: all else that it is called with.

        Returns:
            What `run` returns, in memory of its own.
        """
        if not _is_unseen(patches):
            return run(patches, **kwargs)
        deterministic = torch.are_deterministic_algorithms_enabled()
        size = grid, patches.shape, patches.dtype, patches.device, deterministic
        with self._lock:
            found = self._sizes.get(size)
            if isinstance(found, _Recording) and self._state.lies_still():
                outputs = self._replay(found, patches)
                # Asked while the GPU works; what it reads is the tower's in any case.
                if self._state.is_that_of(tower):
                    self._sizes.move_to_end(size)
                    return outputs
            found = self._find(tower, run, size, patches, kwargs)
            if found is not None:
                return self._replay(found, patches)
        return run(patches, **kwargs)

    def _replay(self, recording: "_Recording", patches: torch.Tensor) -> Any:
        with self._recorder.turn():
            return recording.replay(patches)

    def _find(
        self,
        tower: nn.Module,
        run: Callable,
        size: Hashable,
        patches: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> "_Recording | None":
        """The recording of a size, made where it is due; all are forgotten of another tower."""
        device = patches.device
        if self._state is None or self._state.device != device or not self._state.is_that_of(tower):
            self._forget(len(self._sizes))
            self._state, self._recorder = _State(tower, device), None
        if not self._state.may_be_replayed():
            return None
        found = self._sizes.pop(size, 0)
        if isinstance(found, int):
            found += 1
            if found == _CALLS:
                self._recorder = self._recorder or Recorder(device)
                with contextlib.suppress(RuntimeError):  # of what waits for the GPU
                    found = _Recording(self._recorder, run, patches, kwargs)
        self._sizes[size] = found
        self._forget(len(self._sizes) - _SIZES)
        return found if isinstance(found, _Recording) else None

    def _forget(self, number: int) -> None:
        if number > 0 and self._recorder is not None:
            self._recorder.wait()  # the memory may be in use again at once
        for _ in range(number):
            self._sizes.popitem(last=False)


def _is_unseen(patches: torch.Tensor) -> bool:
    """Whether nobody would miss a tower's operators, as far as it is seen here, and it gains."""
    return (
        len(patches) <= _MOST_TOKENS
        and can_record(patches.device)
        and goes_unseen((patches,))
        and not torch.is_autocast_enabled(patches.device.type)
    )


class _State:
    """What a recording fixes of a tower, as it was when this was made.

    The tower itself is not held by it: with the last reference to a model its memory is free.
    """

    def __init__(self, tower: nn.Module, device: torch.device) -> None:
        modules = list(tower.modules())
        layers = modules[1:]  # the tower's own hooks are run around a replay
        held = [vars(layer) for layer in layers] + [vars(tower.config)]
        parts = ((m._modules, m._parameters, m._buffers) for m in modules)
        self.device = device
        self._layers = layers
        self._parts = held + [part for part in itertools.chain(*parts) if part]
        self._hooks = [vars(layer)[name] for layer in layers for name in _HOOKS]
        self._hooked, self._registered = True, -1
        tensors = (x for m in modules for x in (*m._parameters.values(), *m._buffers.values()))
        self._tensors = [x for x in tensors if x is not None]
        self._identities = list(map(id, self._holds(tower)))
        # Kept, so that no other object takes on the identity of one of them.
        self._held = [x for x in self._holds(tower) if not isinstance(x, Recordings)]
        self._places = [x.data_ptr() for x in self._tensors if type(x) in _TENSORS]
        self._is_fixed = (
            self._is_plain() and not tower.training and not any(map(_needs_calling, layers))
        )

    def is_that_of(self, tower: nn.Module) -> bool:
        """Whether all is as it was."""
        return self._is_in_place() and list(map(id, self._holds(tower))) == self._identities

    def lies_still(self) -> bool:
        """Whether a replay, should it be right, may begin: all memory that it reads is there."""
        return self.may_be_replayed() and self._is_in_place()

    def may_be_replayed(self) -> bool:
        """Whether a call does nothing but what follows from the tower as it was."""
        if not self._is_fixed or self._is_hooked():
            return False
        return not (torch.is_grad_enabled() and any(x.requires_grad for x in self._tensors))

    def _is_hooked(self) -> bool:
        """Whether somebody sees a layer's calls."""
        registered = RemovableHandle.next_id  # that many hooks there have been, of all modules
        if self._hooked or registered != self._registered:
            self._hooked, self._registered = any(self._hooks), registered
        return self._hooked or _has_any_global_hook()

    def _is_in_place(self) -> bool:
        return [x.data_ptr() for x in self._tensors] == self._places

    def _holds(self, tower: nn.Module) -> Iterator[Any]:
        """All that the modules hold, and what they run."""
        held = itertools.chain.from_iterable(map(dict.values, self._parts))
        runs = (type(module).forward for module in (tower, *self._layers))
        return itertools.chain(vars(tower).values(), held, runs)

    def _is_plain(self) -> bool:
        """Whether all tensors lie on the device; products in fp32 follow settings of PyTorch's."""
        return all(
            type(x) in _TENSORS and x.device == self.device and not x.is_neg()
            and (x.itemsize <= 2 or not isinstance(x, nn.Parameter))
            for x in self._tensors
        )  # fmt: skip


def _needs_calling(layer: nn.Module) -> bool:
    """Whether a layer does something else in a call than its class, known, does in inference."""
    held = vars(layer)
    return (
        layer.training
        or "forward" in held
        # Of FSDP and the like, which put other memory there in each call.
        or any(isinstance(x, torch.Tensor) for x in held.values())
        or _is_foreign(getattr(type(layer), "own_class", type(layer)).forward)
    )


@functools.cache
def _is_foreign(forward: Callable) -> bool:
    return foreign_home(forward) is not None


class _Recording:
    """One call with the memory that it reads and writes."""

    def __init__(
        self, recorder: Recorder, run: Callable, patches: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        self._patches = patches.clone()
        # The caller may write to the grid, and the plan may be forgotten.
        self._read = kwargs | {"grid_thw": kwargs["grid_thw"].clone()}
        self._replay, self._outputs = recorder.record(lambda: run(self._patches, **self._read))

    def replay(self, patches: torch.Tensor) -> Any:
        """The outputs for other patches of the same sizes."""
        self._patches.copy_(patches)
        self._replay()
        return tree_map_only(torch.Tensor, torch.clone, self._outputs)
