"""Answers about faces, as documents: what schemas.py says of them, built once and encoded once.

A face of a photo has some fifty numbers and hundreds more in its vector. A model of each, validated and walked again to
be encoded, costs more than what surrounds it (docs/decisions/0033). Fields without a value are left out.
tests/service/test_answers.py holds the documents to the models.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson
from starlette.responses import Response

from models.gate import QualityGate
from models.network import Float
from service.decision import RiskTarget, Thresholds
from service.errors import KithError
from service.pipeline import Face, Photo

DEFAULT_GATE: Final = QualityGate()

Document = dict[str, Any]


def answer(document: Document, status: int = 200) -> Response:
    return Response(encoded(document), status, media_type="application/json")


def encoded(document: Document) -> bytes:
    """JSON; float32 in as few digits as give the same float32 again."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def with_values(**fields: Any) -> Document:
    """Those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def photo(seen: Photo | KithError) -> Document:
    """PhotoOut."""
    if isinstance(seen, KithError):
        return {"faces": [], "error": problem(seen)}
    return {
        "width": seen.width,
        "height": seen.height,
        "faces": [face(one) if one.vector is None else face(one) | {"embedding": one.vector} for one in seen.faces],
    }


def face(seen: Face, gate: QualityGate = DEFAULT_GATE, live_from: float | None = None) -> Document:
    """FaceOut, without the embedding. ``live_from``: which score is live; None: the pack says."""
    reasons = gate.reasons(seen.quality)
    live = seen.liveness
    judged = {} if live is None else {"liveness": {"score": live.score, "verdict": live.verdict(live_from)}}
    return {
        "box": _rounded(seen.box_xyxy),
        "landmarks": _rounded(seen.landmarks_xy),
        "score": round(seen.score, 4),
        "quality": {**seen.quality.as_dict(), "usable": not reasons, "reasons": reasons},
        **judged,
    }


def risk(target: RiskTarget, thresholds: Thresholds) -> Document:
    """RiskOut."""
    return {target.kind: target.value, "source": thresholds.source, "extrapolated": thresholds.extrapolated}


def problem(error: KithError) -> Document:
    """Problem."""
    return with_values(**error.document())


def kept_problem(error: KithError) -> Document:
    """Problem, as it is kept for repeated requests."""
    return with_values(**error.kept())


def _rounded(pixels: Float) -> Any:
    """To a tenth, as orjson takes them."""
    return np.round(pixels, 1).astype(np.float32, copy=False)
