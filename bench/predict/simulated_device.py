"""The device on which a prediction runs: streams and events in name only, tensors without memory.

torch's PrivateUse1 slot becomes a device type of its own, for as long as the process lives;
simulations therefore have a process to themselves. A process group of any size, whose collectives
do nothing, stands for the other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from torch.utils import backend_registration

DEVICE_TYPE = "simgpu"
BACKEND = "simulated"
# both have a fused CUDA kernel, and a composite one for devices without any kernel of their own
FUSED_ON_CUDA = ("silu_backward", "mish_backward")

_numbers = itertools.count()
_current = threading.local()
_libraries: list[torch.library.Library] = []  # registrations last as long as these do


class SimulatedStream:
    """A queue by number; what waits on it has been done already."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = next(_numbers)

    @property
    def device(self) -> torch.device:
        """The one device."""
        return torch.device(DEVICE_TYPE, 0)

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event."""
        return event or SimulatedEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Tell that all work is done."""
        return True


class SimulatedEvent:
    """A point that has always passed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Tell that it has passed."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds to another event: none."""
        return 0.0


DEFAULT_STREAM = SimulatedStream()


def current_stream(_device: Any = None) -> SimulatedStream:
    """Return the stream that this thread is on; autograd's own threads start on the default one."""
    return getattr(_current, "stream", DEFAULT_STREAM)


@contextlib.contextmanager
def use_stream(stream: SimulatedStream | None) -> Iterator[None]:
    """Be on `stream` in the `with` body."""
    before = current_stream()
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


class SimulatedModule(backend_registration._DummyBackendModule):
    """What `torch.get_device_module` answers for the device: what FSDP2 and the engine call."""

    Stream, Event = SimulatedStream, SimulatedEvent
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(lambda _device=None: DEFAULT_STREAM)
    stream = staticmethod(use_stream)
    set_device = staticmethod(lambda _device: None)
    synchronize = staticmethod(lambda _device=None: None)
    device = staticmethod(lambda _device: contextlib.nullcontext())
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda _device=None: torch.zeros(16, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda _state, _device=None: None)


def claim_device() -> None:
    """Make PrivateUse1 the simulated device, for as long as the process lives.

    A second call does nothing. Raises RuntimeError where another extension has the slot.
    """
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend(
        DEVICE_TYPE, backend_module=SimulatedModule()
    )
    # with any kernel registered autograd calls the fused operator, whose shapes are CUDA's
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in FUSED_ON_CUDA:
        library.impl(name, compute_nothing, "PrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    dist.Backend.register_backend(
        BACKEND,
        fake_pg._create_fake_pg,
        extended_api=True,
        devices=["cpu", DEVICE_TYPE],
    )


def compute_nothing(_gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Stand for the kernel of a fused backward; only its shapes are asked for."""
    return torch.empty_like(values)


def join_simulated_world(world_size: int, rank: int) -> None:
    """Make the default process group: `world_size` ranks, of which this process is one."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  # shapes of c10d's operators

    dist.init_process_group(BACKEND, store=fake_pg.FakeStore(), rank=rank, world_size=world_size)
