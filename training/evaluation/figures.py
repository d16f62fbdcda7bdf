"""Names and texts of the figures of a pack or a run, for tables and model cards."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

INTERVAL: Final = "[[ (95 %: {{{0}[0]:.{1}%}} to {{{0}[1]:.{1}%}})]]"


def _with_interval(value: str, interval: str, digits: int) -> str:
    return value + INTERVAL.format(interval, digits)


MEASURES: Final[Mapping[str, str]] = {
    "LFW View 2 accuracy": _with_interval(
        "{lfw_view2[accuracy][mean]:.2%} ± {lfw_view2[accuracy][std]:.2%}", "lfw_view2[intervals][accuracy]", 2
    ),
    "LFW View 2 TAR at FAR 0.1 %": _with_interval(
        "{lfw_view2[tar_at_far_1e3]:.1%}", "lfw_view2[intervals][tar_at_far_1e3]", 1
    ),
    "LFW View 2 EER": _with_interval("{lfw_view2[eer]:.2%}", "lfw_view2[intervals][eer]", 2),
    "LFW View 2 photos without a face": "{lfw_view2[photos_without_face]}",
    "LFW View 1 test accuracy (its own best threshold)": "{lfw_view1[accuracy][mean]:.2%}",
    "LFW open set rank-1": _with_interval("{lfw_open_set[rank1]:.1%}", "lfw_open_set[rank1_interval]", 1),
    **{
        f"LFW open set FNIR at FPIR {float(rate):.1%}": _with_interval(
            f"{{lfw_open_set[fnir][{rate}]:.1%}} (threshold {{lfw_open_set[thresholds][{rate}]:.3f}})",
            f"lfw_open_set[fnir_intervals][{rate}]",
            1,
        )
        for rate in ("0.1", "0.01", "0.001")
    },
    "LFW open set FNIR at FPIR 0.1% without five doubtful strangers": (
        "{lfw_open_set[fnir_without_doubtful][0.001]:.1%}"
    ),
    "LFW central face found": "{lfw_central_faces[found]:.2%} of {lfw_central_faces[photos]}",
    "LFW median landmark error": _with_interval(
        "{lfw_central_faces[median_landmark_error]:.2%} of the eye distance",
        "lfw_central_faces[landmark_error_interval]",
        2,
    ),
    "WIDER val recall, faces ≥ 32 px, as served": _with_interval(
        "{wider_val[recall]:.1%}", "wider_val[intervals][recall]", 1
    )
    + " at precision {wider_val[precision]:.1%}",
    **{
        f"WIDER val recall at precision {precision} %": _with_interval(
            f"{{wider_val[recall_at_precision_{precision}]:.1%}} "
            f"(score {{wider_val[score_at_precision_{precision}]:.2f}}, {{wider_val[faces]}} faces)",
            f"wider_val[intervals][recall_at_precision_{precision}]",
            1,
        )
        for precision in (90, 95)
    },
}
"""Text of each figure of the metrics of `evaluate_pack`, by its name."""


class _Figures(string.Formatter):
    """Fills in figures. An empty one counts as missing."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, used = super().get_field(field_name, args, kwargs)
        if value is None or value == "":
            raise KeyError(field_name)
        return value, used


def fill(text: str, figures: Mapping[str, Any]) -> str:
    """Return the text with its figures, or an empty text if one outside of double brackets is missing."""
    filled = []
    for i, part in enumerate(re.split(r"\[\[(.*?)\]\](?!\])", text, flags=re.DOTALL)):
        try:
            filled.append(_Figures().vformat(part, (), figures))
        except (KeyError, IndexError, TypeError):
            if i % 2 == 0:
                return ""
    return "".join(filled)


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the metrics of `evaluate_pack` or of a manifest."""
    plain = json.loads(json.dumps(metrics))
    filled = {name: fill(text, plain) for name, text in MEASURES.items()}
    return [(name, value) for name, value in filled.items() if value]
