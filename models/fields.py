"""Fields of untrusted JSON and TOML documents, and the error that names the invalid one."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, StrictFloat, StrictInt, StringConstraints, TypeAdapter, ValidationError

from models.errors import PackError

MAX_NUMBER: Final = 1e6

NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Name = Annotated[Text, StringConstraints(pattern=f"^{NAME}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[StrictFloat, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
PositiveInt = Annotated[StrictInt, Field(gt=0)]


def checked(kind: Any, value: object, name: str = "") -> Any:
    """Return a value of an untrusted document as an object of ``kind``, a type.

    Raises:
        PackError: the first problem, with the dotted path of its field below ``name``.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        # Pydantic marks an invalid key of an object with a last part of its own.
        parts = [part for part in problem["loc"] if part != "[key]"]
        path = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        raise PackError(path.removeprefix("."), problem["msg"].removeprefix("Value error, ")) from error
