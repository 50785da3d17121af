"""Tensors that are bound as objects, by the idioms of onnxruntime's users: a run looks them up."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from support import assert_same

from onnx_fuse import InferenceSession
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import device, exchange
from onnx_fuse.runtime.tensor import DeviceTensor, DlTensor, capsule

MODEL = "agraph (float[N,8] x, float[8] b) => (float[N,8] y, float[N,8] z) "
BODY = "{ y = Add(x, b) z = Neg(x) }"
BIAS = np.linspace(-1, 1, 8, dtype=np.float32)
WORKS_IN = 7
"""The stream that the other library works in."""


def session() -> InferenceSession:
    return InferenceSession(text_model(MODEL + BODY), device="cuda")


def memory(array: np.ndarray, skew: int = 0) -> np.ndarray:
    """A copy at an address that is a multiple of 256, and `skew` more."""
    raw = np.empty(array.nbytes + 512, np.uint8)
    start = -raw.ctypes.data % 256 + skew
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Lent:
    """What another library has on the GPU; `array` may become another behind the binding's back."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = memory(array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        x = self.array
        steps = [s // x.itemsize for s in x.strides]
        return capsule(x.ctypes.data, (2, 0), x.shape, steps, x.dtype, x)


class WithInterface(Lent):
    """As CuPy has it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        x = self.array
        place = {"shape": x.shape, "typestr": x.dtype.str, "data": (x.ctypes.data, False)}
        return {**place, "version": 3, "strides": None, "stream": WORKS_IN}


class LikeOrtValue(Lent):
    """As onnxruntime has it."""

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def element_type(self) -> int:
        return int(self.array.dtype.num)


def _tensor(value: Any, place: int) -> int:
    x, found = value.array, DlTensor.from_address(place)
    value.sizes = (ctypes.c_int64 * x.ndim)(*x.shape)
    found.data, found.device_type, found.device_id, found.ndim = x.ctypes.data, 2, 0, x.ndim
    found.code, found.bits, found.lanes, found.byte_offset = 2, 8 * x.itemsize, 1, 0
    found.shape, found.strides = value.sizes, None
    return 0


def _stream(kind: int, device_id: int, place: int) -> int:
    ctypes.c_void_p.from_address(place).value = WORKS_IN
    return 0


INTERFACE = exchange.ExchangeInterface(1, 3)
for _name, _type in exchange.ExchangeInterface._fields_[-2:]:
    setattr(INTERFACE, _name, _type({"tensor": _tensor, "stream": _stream}[_name]))
_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class WithExchange(Lent):
    """As PyTorch has it."""

    __dlpack_c_exchange_api__ = _NEW(ctypes.addressof(INTERFACE), exchange.NAME, None)


class AdoptedAlone(Lent):
    """One that only its capsule tells about."""


def tensor(array: np.ndarray) -> DeviceTensor:
    copy = memory(array)
    return DeviceTensor(copy.ctypes.data, copy.shape, "float32", 0, copy)


LIBRARIES = [WithInterface, LikeOrtValue, WithExchange, AdoptedAlone, tensor]


def x_of(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 8), np.float32)


def same(found: list[Any], x: np.ndarray) -> None:
    assert_same(found, (x + BIAS, -x))


def bound(runs: InferenceSession, x: Any, b: Any = BIAS) -> Any:
    binding = runs.io_binding()
    binding.bind_ortvalue_input("x", x)
    if isinstance(b, np.ndarray):
        binding.bind_cpu_input("b", b)
    else:
        binding.bind_ortvalue_input("b", b)
    for name in "yz":
        binding.bind_output(name, "cuda")
    return binding


@pytest.mark.parametrize("of", LIBRARIES)
def test_a_tensor_that_stays_is_a_lookup(of: Callable[[np.ndarray], Any], gpu: FakeGpu) -> None:
    """Outputs that nobody holds get the same memory, and a graph is launched as it is."""
    runs, x = session(), of(x_of(0))
    binding = bound(runs, x)
    for i in range(6):
        if isinstance(x, Lent):
            x.array[...] = x_of(i)
        runs.run_with_iobinding(binding, synchronize=i % 2 == 0)
        same(binding.copy_outputs_to_cpu(), x_of(i) if isinstance(x, Lent) else x_of(0))
    gpu.counts.clear()
    prepared = binding.prepared
    assert (prepared is None) == (of is AdoptedAlone)
    for _ in range(3):
        runs.run_with_iobinding(binding, synchronize=False)
        assert binding.prepared is prepared
    assert gpu.counts["cuGraphLaunch"] == 3
    assert not gpu.counts["cuMemAllocFromPoolAsync"] + gpu.counts["cuMemFreeAsync"]
    if of in (WithInterface, WithExchange):
        assert gpu.counts["cuStreamWaitEvent"] == 3, "for what its library still does with it"
    if of is not AdoptedAlone:
        assert not gpu.counts["update"] + gpu.counts["cuMemcpyDtoDAsync"]


@pytest.mark.parametrize("of", LIBRARIES)
def test_outputs_that_somebody_has_are_never_overwritten(
    of: Callable[[np.ndarray], Any], gpu: FakeGpu
) -> None:
    runs, held = session(), []
    for i in range(12):
        x = of(x_of(i))
        if not i:
            binding = bound(runs, x)
        binding.bind_ortvalue_input("x", x)
        for name in "yz":
            binding.bind_output(name, "cuda")
        runs.run_with_iobinding(binding, synchronize=False)
        outputs = binding.get_outputs()
        held.append((outputs, x_of(i)) if i % 3 else ([outputs[0], None], x_of(i)))
        del outputs
    for (y, z), x in held:
        np.testing.assert_array_equal(np.asarray(y), x + BIAS)
        if z is not None:
            np.testing.assert_array_equal(np.asarray(z), -x)


@pytest.mark.parametrize("of", LIBRARIES[:-1])
def test_a_tensor_that_changes_while_it_is_bound(
    of: Callable[[np.ndarray], Any], gpu: FakeGpu
) -> None:
    """It is the same object, with other memory or another shape."""
    runs, x = session(), of(x_of(0))
    binding = bound(runs, x)
    for i, rows in enumerate((4, 4, 4, 4, 6, 6, 4, 0, 5, 4)):
        x.array = memory(x_of(i, rows), skew=4 if i in (2, 5) else 0)
        runs.run_with_iobinding(binding)
        same(binding.get_outputs(), x_of(i, rows))


@pytest.mark.parametrize("of", LIBRARIES)
def test_a_place_that_is_an_object(of: Callable[[np.ndarray], Any], gpu: FakeGpu) -> None:
    """It may be the input's, or overlap it, once the input is another."""
    runs, x, y = session(), of(x_of(0)), of(x_of(1))
    binding = bound(runs, x, of(BIAS))
    binding.bind_ortvalue_output("y", y)
    for i in range(10):
        value = {3: y, 7: y}.get(i, x)
        array = memory(x_of(i)) if value is x else np.asarray(binding.get_outputs()[0]).copy()
        if isinstance(value, Lent):
            value.array[...] = array
        else:
            ctypes.memmove(value.address, memory(array).ctypes.data, value.nbytes)
        binding.bind_ortvalue_input("x", value)
        runs.run_with_iobinding(binding)
        same(binding.get_outputs(), array)
        if isinstance(y, Lent):
            np.testing.assert_array_equal(y.array, array + BIAS)


@pytest.mark.parametrize("of", [WithInterface, WithExchange])
def test_what_its_library_does_with_a_place_comes_first(of: type[Lent], gpu: FakeGpu) -> None:
    """Of an address nobody knows, and it may become an object."""
    runs, y = session(), of(x_of(1))
    binding = bound(runs, x_of(0))
    for i in range(6):
        if i < 3:
            binding.bind_output("y", "cuda", 0, "float32", y.array.shape, y.array.ctypes.data)
        elif i == 3:  # its library makes this run wait
            binding.bind_ortvalue_output("y", y)
        gpu.order.clear()
        runs.run_with_iobinding(binding)
        assert (("record", WORKS_IN) in [one[:2] for one in gpu.order]) == (i > 3)


def test_arrays_that_are_bound_anew(gpu: FakeGpu) -> None:
    runs = session()
    binding = bound(runs, x_of(0))
    for i, rows in enumerate((4, 4, 4, 3, 3, 4)):
        binding.bind_cpu_input("x", x_of(i, rows))
        runs.run_with_iobinding(binding)
        same(binding.get_outputs(), x_of(i, rows))
    binding.bind_cpu_input("x", x_of(0).astype(np.float64))
    with pytest.raises(Exception, match="Unexpected input data type"):
        runs.run_with_iobinding(binding)


CACHE = """
agraph (float[N,4] past, float[1,4] new) => (float[M,4] present, float[1,4] y)
{ present = Concat<axis = 0>(past, new) y = Neg(new) }
"""


def test_an_output_may_alternate_between_places(gpu: FakeGpu) -> None:
    """What a run found out stays, unless the next place is of another kind."""
    runs, x = session(), x_of(3)
    binding, places = runs.io_binding(), [memory(np.zeros_like(x)) for _ in range(3)]
    binding.bind_cpu_input("x", x)
    binding.bind_cpu_input("b", BIAS)

    def bound(shape: tuple[int, ...], y: np.ndarray) -> bool:
        binding.bind_output("y", "cuda", 0, np.float32, shape, y.ctypes.data)
        return binding.prepared is not None

    for i in range(12):
        y = places[i % 3]
        assert bound(y.shape, y) == (i > 0)
        runs.run_with_iobinding(binding)
        np.testing.assert_array_equal(y, x + BIAS)
        assert binding.get_outputs()[0].address == y.ctypes.data
        y[...] = 0
    assert not bound((24,), places[0])
    with pytest.raises(UsageError, match="output y is"):
        runs.run_with_iobinding(binding)


@pytest.mark.parametrize("how", ["bound", "fed"])
def test_a_cache_that_grows_stays_on_the_gpu(how: str, gpu: FakeGpu) -> None:
    """An output of one run is an input of the next: nothing of it passes the host."""
    runs = InferenceSession(text_model(CACHE), device="cuda")
    rows = [np.full((1, 4), i, np.float32) for i in range(40)]
    past: Any = tensor(np.zeros((1, 4), np.float32))
    binding = runs.io_binding()
    for row in rows:
        gpu.counts.clear()
        if how == "bound":
            binding.bind_ortvalue_input("past", past)
            binding.bind_cpu_input("new", row)
            binding.bind_output("present", "cuda")
            binding.bind_output("y", "cuda")
            runs.run_with_iobinding(binding, synchronize=False)
            past, _ = binding.get_outputs()
        else:
            past, _ = runs._on_cuda().run(None, {"past": past, "new": row}, on_device=True)
        assert not gpu.counts["cuMemcpyDtoHAsync"] + gpu.counts["cuMemcpyDtoH"]
        assert gpu.counts["cuMemcpyHtoDAsync"] == 1
    np.testing.assert_array_equal(np.asarray(past), np.concatenate([rows[0], *rows]))
    host, _ = runs.run(None, {"past": past, "new": rows[0]})
    np.testing.assert_array_equal(host, np.concatenate([rows[0], *rows, rows[0]]))


def test_memory_that_nobody_has_is_kept_up_to_a_limit(gpu: FakeGpu) -> None:
    pool = device.Pool(device.Stream(), 0)
    pool.keeps = 4096
    sizes = (100, 1000, 1000, 3000, 100, 1001)
    memory = [pool.allocate(n, "some") for n in sizes]
    places = [m.address for m in memory]
    assert [m.nbytes for m in memory] == [104, 1024, 1024, 3072, 104, 1024]
    gpu.counts.clear()
    while memory:
        memory.pop(0)
    assert gpu.counts["cuMemFreeAsync"] == 1, "what is over half of the limit goes back at once"
    assert {pool.allocate(n, "some").address for n in (100, 1020)} <= set(places)
    few = [pool.allocate(1024, "some") for _ in range(3)]
    assert {m.address for m in few} <= set(places)
    few += [pool.allocate(1024, "some") for _ in range(2)]
    assert len({m.address for m in few}) == 5
    del few
    assert gpu.counts["cuMemFreeAsync"] == 1 + 2 + 1, "the sizes that came first go first"


def test_memory_that_is_kept_goes_to_whoever_lacks_it(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = device.Pool(device.Stream(), 0)
    pool.allocate(100, "some")
    results = [(device._OUT_OF_MEMORY, 0), gpu.cuMemAlloc(64)]
    monkeypatch.setattr(gpu, "cuMemAlloc", lambda nbytes: results.pop(0))
    assert device.Memory(64, "a weight").address
    assert not results
    assert gpu.counts["cuMemFreeAsync"] == 1


@pytest.mark.usefixtures("gpu")
def test_an_input_declared_a_scalar_takes_any_shape() -> None:
    """As in onnxruntime: a shape without dimensions is no shape there."""
    model = text_model("agraph (float x) => (float y) { y = Relu(x) }")
    sessions = [InferenceSession(model, device=device) for device in ("cpu", "cuda")]
    for shape in ((), (2, 3), (1,), (0, 2), (4, 3)):
        feed = {"x": np.full(shape, -0.5, np.float32)}
        assert_same(*(session.run(None, feed) for session in sessions))
