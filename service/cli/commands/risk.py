"""Texts of ``kith gallery risk`` and ``kith calibrate``: thresholds and risks of a gallery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from service.cli.terminal import count_of, make_table, print_line, print_table

if TYPE_CHECKING:
    from kith import Kith
    from kith.wire.risk import GalleryRiskOut, TargetOut

TARGETS: Final = Annotated[
    list[float] | None,
    typer.Option(min=0, max=1, help="FPIR target; repeatable. Default: 0.1 to 0.0001."),
]
WARNINGS: Final = {
    "photos_of_one_sitting": "The photos of most subjects look like one sitting's: FNIR holds for photos like those. "
    "Enroll photos of another day.",
    "people_unlike_calibration": "Strangers here match each other {ratio:.2g} times as often as in the pack's "
    "calibration: other ages, origins, masks or cameras. The threshold follows the gallery; check it with photos of "
    "strangers.",
}


def format_risk(risk: dict[str, float]) -> str:
    """Return a gallery's risk in one line: 'fpir 0.001'."""
    return ", ".join(f"{kind} {value:g}" for kind, value in risk.items())


def misses_text(kith: Kith, risk: dict[str, float]) -> str:
    """Return a sentence on what the server's recognizer misses at a new gallery's FPIR, and the pack that misses fewer,
    with a leading space; empty without an FPIR or a calibration."""
    model = kith.model(risk["fpir"]) if "fpir" in risk else None
    if model is None or not model.misses:
        return ""
    (misses,) = model.misses
    better = misses.better
    other = "" if better is None else f"; {better.model} misses {better.fnir:.0%} ('kith models pull {better.model}')"
    return (
        f" With {misses.subject_count} people enrolled by one photo each and an FPIR of {misses.fpir:g}, {model.model} "
        f"misses about {misses.fnir:.0%} of their other photos{other}."
    )


def print_risk(report: GalleryRiskOut) -> None:
    from service.risk.risk_report import GROWTH_FACTOR

    evidence = report.evidence
    print_line(
        f"{count_of(report.subject_count, 'subject')}; {format_risk(report.risk)}: threshold "
        f"{_format_threshold(report.threshold)}"
    )
    grown = f"At {report.subject_count * GROWTH_FACTOR:,} subjects"
    headers = ("FPIR", "Threshold", "95 % interval", "FNIR", grown)
    print_table(make_table(*headers, rows=map(_target_cells, report.targets)))
    print_line(
        f"Evidence: {evidence.source}: {evidence.pair_count:,} pairs of this gallery ({evidence.gallery_share:.0%}), "
        f"{evidence.pack_pair_count:,} pairs of the pack; {evidence.duplicate_pair_count:g} likely duplicates excluded"
    )
    if report.rival is not None and (most := report.most_resembled) is not None:
        print_line(
            f"Each search: higher by a quarter of what its runner-up has above {report.rival:.3f}; for the tenth of "
            f"the people most like strangers, by {most.level:.3f} or more: {most.share:.0%} of false alarms "
            "fall to them"
        )
    if (check := report.check) is not None:
        print_line(
            f"Cross-check: {check.observed_count} of {check.probe_count} subjects, left out and searched for, reach "
            f"the threshold of FPIR {check.fpir:.0%}; expected {check.expected:.1f}"
        )
    if (move := report.last_move) is not None and move.after is not None:
        before, after = (None if t is None else _format_threshold(t) for t in (move.before, move.after))
        if before != after:
            print_line(f"The threshold moved {'' if before is None else f'from {before} '}to {after}. {move.reason}")
    for warning in report.warnings:
        print_line(f"Warning: {WARNINGS[warning].format(ratio=evidence.fmr_over_pack or 0)}")


def _target_cells(target: TargetOut) -> tuple[str, ...]:
    today = target.today
    mark = " (extrapolated)" if today.extrapolated and today.threshold <= 1 else ""
    misses = ""
    if today.fnir is not None and today.fnir_low is not None and today.fnir_high is not None:
        misses = f"{today.fnir:.1%} ({today.fnir_low:.0%} to {today.fnir_high:.0%})"
    return (
        f"{target.fpir:g}",
        f"{_format_threshold(today.threshold)}{mark}",
        f"{_format_threshold(today.low)} to {_format_threshold(today.high)}",
        misses,
        _format_threshold(target.grown.threshold),
    )


def _format_threshold(similarity: float) -> str:
    return f"{similarity:.3f}" if similarity <= 1 else "out of reach"
