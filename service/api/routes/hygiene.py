"""Hygiene: duplicate subjects, mislabeled templates and lookalikes of a gallery."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from kith.wire.hygiene import FindingOut, HygieneOut, NamedOut, TemplateRefOut
from service.api.http.access import ADMIN, BackendDep, GalleryDep, router
from service.api.http.parameters import PageDep, open_cursor_numbers
from service.domain.findings import KINDS, HygieneFinding, HygieneReport
from service.domain.gallery import Gallery, SubjectLabel, Template
from service.risk.hygiene import SIMILARITY_DIGITS, sort_key
from service.storage.db.row_sealing import seal_cursor
from service.storage.repositories.store import Store
from service.usecases.hygiene import inspect_gallery

routes = router("/v1/galleries", "galleries")


@routes.get(
    "/{gallery}/hygiene", dependencies=[ADMIN]
)  # similarities between templates, which a caller may have made up
async def check_hygiene(gallery: GalleryDep, backend: BackendDep, page: PageDep) -> HygieneOut:
    """Find duplicate subjects, mislabeled templates and lookalikes, with the odds of each. Changes nothing.

    The first request after a change of the gallery takes seconds for 10,000 templates. Concurrent requests share it,
    and other requests are served meanwhile.
    """
    after = open_cursor_numbers(gallery.seal, page.cursor, 4)
    report = await inspect_gallery(backend, gallery)
    return await backend.threads.run(_page, backend.store, gallery, report, after, page.limit)


def _page(
    store: Store, gallery: Gallery, report: HygieneReport, after: tuple[int, ...] | None, limit: int
) -> HygieneOut:
    findings, recall = report.findings, report.recall
    start = 0 if after is None else bisect_right(findings, after, key=sort_key)
    shown = findings[start : start + limit]
    more = start + limit < len(findings)
    named = [*shown, *report.nearest]
    subjects = store.subjects.names(gallery, {pk for finding in named for pk in finding.subjects})
    templates = store.templates.by_pk(gallery, sorted({pk for finding in named for pk in finding.templates}))

    def present(part: Sequence[HygieneFinding]) -> list[FindingOut]:
        # Leave out subjects and templates that were deleted since the snapshot.
        return [
            _finding_out(finding, subjects, templates)
            for finding in part
            if subjects.keys() >= set(finding.subjects) and templates.keys() >= set(finding.templates)
        ]

    counts = Counter(finding.kind for finding in findings)
    return HygieneOut(
        gallery=gallery.name,
        counts={kind: counts[kind] for kind in KINDS},
        data=present(shown),
        nearest=present(report.nearest),
        expected_recall=None if recall is None else round(recall.value, 3),
        expected_recall_low=None if recall is None else round(recall.low, 3),
        expected_recall_high=None if recall is None else round(recall.high, 3),
        next=seal_cursor(gallery.seal, *sort_key(shown[-1])) if more else None,
    )


def _finding_out(
    finding: HygieneFinding, subjects: dict[int, SubjectLabel], templates: dict[int, Template]
) -> FindingOut:
    return FindingOut(
        kind=finding.kind,
        subjects=[NamedOut(subject=subjects[pk].id, name=subjects[pk].name) for pk in finding.subjects],
        templates=[
            TemplateRefOut(template=templates[pk].id, subject=templates[pk].subject) for pk in finding.templates
        ],
        similarity=_round_similarity(finding.similarity),
        chance=finding.chance,
        odds=None if finding.odds is None else float(f"{finding.odds:.3g}"),
        own_similarity=_round_similarity(finding.own_similarity),
        belongs_to=None if finding.belongs_to is None else subjects[finding.belongs_to].id,
        action=finding.action,
    )


def _round_similarity(similarity: float | None) -> float | None:
    return None if similarity is None else round(similarity, SIMILARITY_DIGITS)
