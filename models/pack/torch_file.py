"""Reader of weights in PyTorch's file format before version 1.6, without PyTorch and without executing pickles.

The file is a sequence of pickles (a magic number, the version, the byte order, the state dictionary, the keys of the
storages) and the storages themselves. The opcodes of the dictionary are interpreted here; those that name a function
build a tensor or a dictionary, and any other name is refused.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.errors import ModelError

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
VERSION: Final = 1001
MAX_BYTES: Final = 100_000_000
STORAGE_TYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "torch FloatStorage": np.dtype("<f4"),
    "torch LongStorage": np.dtype("<i8"),
}
DICTIONARY: Final = "collections OrderedDict"
TENSOR: Final = "torch._utils _rebuild_tensor_v2"


class TorchFileError(ModelError):
    """File that is damaged, or holds more than tensors by name."""


@dataclass(frozen=True)
class _Storage:
    key: str
    type: np.dtype[Any]
    size: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def read_tensors(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the tensors of a state dictionary by name.

    Raises:
        TorchFileError: the file has another format, is damaged, or holds something else than contiguous tensors of
            float32 and int64.
    """
    if len(content) > MAX_BYTES:
        raise TorchFileError(f"the file of weights has more than {MAX_BYTES:,} bytes")
    stream = io.BytesIO(content)
    try:
        if _interpret(stream) != MAGIC_NUMBER or _interpret(stream) != VERSION:
            raise TorchFileError("the file is not in PyTorch's format before version 1.6")
        if _interpret(stream).get("little_endian") is not True:
            raise TorchFileError("the file of weights is not little-endian")
        tensors, keys = _interpret(stream), _interpret(stream)
        storages: dict[str, NDArray[Any]] = {}
        sizes = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
        for key in keys:
            storage = sizes[key]
            (size,) = np.frombuffer(stream.read(8), "<i8")
            if size != storage.size:
                raise TorchFileError(f"storage {key} has {size} numbers, not {storage.size}")
            storages[key] = np.frombuffer(stream.read(storage.size * storage.type.itemsize), storage.type, storage.size)
        return {name: _view(tensor, storages) for name, tensor in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise TorchFileError(f"the file of weights is damaged ({error})") from error


def _view(tensor: _Tensor, storages: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    count = math.prod(tensor.shape)
    return storages[tensor.storage.key][tensor.offset : tensor.offset + count].reshape(tensor.shape)


def _interpret(stream: io.BytesIO) -> Any:
    """Return the value of the pickle at the stream's position."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                (value,) = stack
                return value
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                stack.append(_MARK)
            case "GLOBAL":
                if argument not in (DICTIONARY, TENSOR, *STORAGE_TYPES):
                    raise TorchFileError(f"the file of weights names {argument!r}, which is not executed")
                stack.append(argument)
            case "BINPERSID":
                kind, storage_type, key, _device, size, _view_of = stack.pop()
                if kind != "storage":
                    raise TorchFileError("the file of weights refers to something else than a storage")
                stack.append(_Storage(key, STORAGE_TYPES[storage_type], size))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(
                    _build_tensor(*arguments) if function == TENSOR else _build_dictionary(function, arguments)
                )
            case "BUILD":
                stack.pop()  # attributes of the dictionary: version numbers of layers
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            case "TUPLE":
                stack.append(tuple(_pop_to_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(opcode.name[-1]))]
                stack.append(tuple(items[::-1]))
            case "APPENDS":
                items = _pop_to_mark(stack)
                stack[-1].extend(items)
            case "SETITEMS":
                items = _pop_to_mark(stack)
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "APPEND":
                value = stack.pop()
                stack[-1].append(value)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case name:
                raise TorchFileError(f"the file of weights has the opcode {name}, which weights do not need")
    raise TorchFileError("the file of weights ends early")


def _build_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    contiguous = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    end = offset + math.prod(shape)
    if not isinstance(storage, _Storage) or strides != contiguous or offset < 0 or min((0, *shape)) < 0:
        raise TorchFileError("the file of weights has a tensor that is not contiguous")
    if end > storage.size:
        raise TorchFileError("the file of weights has a tensor that is larger than its storage")
    return _Tensor(storage, offset, shape)


def _build_dictionary(function: Any, arguments: Any) -> dict[str, Any]:
    if function != DICTIONARY or arguments != ():
        raise TorchFileError(f"the file of weights calls {function!r}, which is not executed")
    return {}


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


_MARK: Final = object()
_CONSTANTS: Final[Mapping[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
}
