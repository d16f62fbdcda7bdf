"""Enrollment of photos and embeddings of one subject."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kith.wire.subjects import EnrollIn
from models.runtime.network import Float
from service.core import deadlines
from service.core.errors import (
    DuplicateSubjectError,
    GalleryChangedError,
    GalleryMovedError,
    InconsistentTemplateError,
    KithError,
    SubjectExistsError,
)
from service.domain.gallery import Gallery, IdempotentResponse, NewTemplate
from service.inference.photo_pipeline import Photo, each_photo
from service.inference.recognizers import ServedRecognizer, check_recognizer, check_vectors
from service.security.api_keys import Caller
from service.usecases.backend import Backend
from service.usecases.documents import Document, encode_json, face_document, problem_document
from service.usecases.enrollment_checks import (
    choose_face,
    embed_for,
    enroll_on,
    needs_identity_check,
    new_template,
    refuse_identities,
    template_from_face,
)


@dataclass(frozen=True)
class Enrolled:
    """``document``: the JSON of an ``EnrollOut``. ``stored``: whether templates were stored, now or by the first
    attempt of a repeated request. ``replayed``: the document is the first attempt's."""

    document: str
    stored: bool
    replayed: bool = False


async def enroll(
    backend: Backend,
    snapshot: Gallery,
    caller: Caller,
    subject: str,
    body: EnrollIn,
    key: str | None,
    only_new: bool,
) -> Enrolled:
    """Enroll the photos and embeddings of ``body``. ``key``: an Idempotency-Key.

    Raises the rejection of a single photo or embedding.
    """
    enrollment = _Enrollment(backend, caller, subject, body, key, only_new)
    return await enroll_on(backend, snapshot, caller, body, enrollment.run)


@dataclass(frozen=True)
class _Enrollment:
    """Enrollment request. ``run`` may be repeated after the gallery moved to another recognizer."""

    backend: Backend
    caller: Caller
    subject: str
    body: EnrollIn
    key: str | None
    only_new: bool

    async def run(self, gallery: Gallery) -> Enrolled:
        backend, body = self.backend, self.body
        served = backend.recognizers.for_gallery(gallery)
        exists = None
        if self.only_new:  # before the photos are compared with the templates of an existing subject
            try:
                await backend.threads.run(backend.store.subjects.refuse_existing, gallery, self.subject)
            except SubjectExistsError as error:  # perhaps created by the first attempt of this request
                exists = error
        if earlier := await self._stored_answer(gallery):
            return Enrolled(earlier, True, True)
        if exists is not None:
            raise exists
        if body.recognizer is not None or body.embeddings:
            check_recognizer(gallery, body.recognizer)

        results, templates = await self._examine(gallery, served)
        if not needs_identity_check(gallery, backend.risks, self.body):
            await self._report_rejections(gallery, results, results)
            return await self._store(gallery, results, templates, checked=False)
        async with backend.enrolling.of(gallery.pk):
            return await self._check_and_store(gallery, results, templates)

    async def _stored_answer(self, gallery: Gallery) -> str | None:
        if self.key is None:
            return None
        return await self.backend.threads.run(
            self.backend.store.templates.stored_answer, gallery, self.key, self._digest
        )

    @cached_property
    def _digest(self) -> str:
        """Digest that is equal for repetitions of the request. It reads all photos."""
        digest = hashlib.sha256(self.subject.encode())
        digest.update(self.body.model_dump_json(exclude={"images", "recognizer"}).encode())
        for payload in self.body.images:
            digest.update(hashlib.sha256(payload).digest())
        return digest.hexdigest()

    async def _examine(
        self, gallery: Gallery, served: ServedRecognizer
    ) -> tuple[list[Document], dict[int, NewTemplate]]:
        """Return a result per photo and embedding, whose ``error`` is its rejection, and templates by result."""
        backend, body = self.backend, self.body
        vectors = check_vectors(body.embeddings, served.dimension)
        photos = await each_photo([embed_for(backend, gallery, photo, body.detail) for photo in body.photos])
        results: list[Document] = [{"image": i} for i in range(len(photos))]
        results += [{"embedding": i} for i in range(len(vectors))]
        items: list[Photo | KithError | Float] = [*photos, *vectors]
        templates: dict[int, NewTemplate] = {}
        for i, item in enumerate(items):
            try:
                templates[i] = self._new_template(gallery, item, results[i])
            except KithError as rejection:
                results[i]["error"] = rejection
        return results, templates

    async def _check_and_store(
        self, gallery: Gallery, results: list[Document], templates: dict[int, NewTemplate]
    ) -> Enrolled:
        """Compare the templates with the gallery and store them; again if its templates changed in between.

        The writes of other processes are found only then, since a turn is among the requests of this process.

        Raises the rejection of a single photo or embedding.
        """
        backend, reported = self.backend, [result for result in results if "error" in result]
        while True:
            current = await backend.reload_gallery(gallery)
            if current.generation != gallery.generation:
                raise GalleryMovedError(f"gallery {gallery.name!r} moved to another recognizer meanwhile")
            run = backend.threads.run
            refused = await refuse_identities(templates, current, self.subject, backend, self.body, run)
            for i, rejection in refused.items():
                results[i].pop("template", None)
                results[i]["error"] = rejection
                reported.append(results[i])
            await self._report_rejections(gallery, results, reported)
            try:
                return await self._store(current, results, templates, checked=True)
            except GalleryChangedError:
                reported = []
                deadlines.check()

    async def _store(
        self, gallery: Gallery, results: list[Document], templates: dict[int, NewTemplate], checked: bool
    ) -> Enrolled:
        """Store the templates. Raises GalleryChangedError: ``checked``, and the checks must be repeated."""
        backend, key = self.backend, self.key
        for i, template in templates.items():
            results[i]["template"] = template.id

        def encode(redacted: bool = False) -> str:
            documents = [dict(result) for result in results]
            for document in documents:
                if (error := document.get("error")) is not None:
                    document["error"] = problem_document(error.redacted() if redacted else error)
            return encode_json(
                {"subject": self.subject, "enrolled_count": len(templates), "results": documents}
            ).decode()

        if not templates:
            return Enrolled(encode(), False)
        idempotent = IdempotentResponse(key, self._digest, encode(redacted=True)) if key else None
        new = list(templates.values())
        with backend.metrics.stage("write"):
            earlier = await backend.threads.run(
                backend.store.templates.enroll, gallery, self.subject, new, idempotent, self.only_new, checked
            )
        backend.metrics.count_enrollment("enrolled", len(new))
        backend.risks.derive_later(gallery)
        return Enrolled(earlier or encode(), True, earlier is not None)

    def _new_template(self, gallery: Gallery, item: Photo | KithError | Float, result: Document) -> NewTemplate:
        """Create a template and add the face to ``result``. Raises the photo's own error, or why it is rejected."""
        if isinstance(item, KithError):
            raise item
        if not isinstance(item, Photo):
            return new_template(item, gallery, self.body)
        settings = gallery.settings
        result["face_count"] = item.face_count
        face = choose_face(item, self.body.face, settings.quality_gate)
        result["face"] = face_document(face, settings.quality_gate, settings.liveness_threshold)
        return template_from_face(face, gallery, self.body)

    async def _report_rejections(self, gallery: Gallery, results: list[Document], new: list[Document]) -> None:
        """Count and audit new rejections, and hide what the caller may not know.

        Raises the rejection of a single photo or embedding.
        """
        refused = [result for result in new if "error" in result]
        errors = [result["error"] for result in refused]
        shown = await report_refused(self.backend, gallery, self.caller, self.subject, errors)
        for result, rejection in zip(refused, shown, strict=True):
            result["error"] = rejection
        if len(results) == 1 and (error := results[0].get("error")) is not None:
            raise error


async def report_refused(
    backend: Backend, gallery: Gallery, caller: Caller, subject: str, errors: Sequence[KithError]
) -> list[KithError]:
    """Count and audit refused faces. Return the errors as the caller may know them."""
    for error in errors:
        backend.metrics.count_enrollment(error.code)
    of_identity = (InconsistentTemplateError, DuplicateSubjectError)
    for code, count in Counter(error.code for error in errors if isinstance(error, of_identity)).items():
        await backend.audit.enrollment_refused(gallery, subject, code, count)
    return [await _redacted(backend, gallery, caller, error) for error in errors]


async def _redacted(backend: Backend, gallery: Gallery, caller: Caller, rejection: KithError) -> KithError:
    """Return a rejection as the caller may know it, and audit which subject a duplicate revealed.

    The scopes identify and read show the subject of a duplicate, vectors also exact similarities.
    """
    if not isinstance(rejection, DuplicateSubjectError):
        return rejection if caller.sees_vectors else rejection.redacted()
    subject = rejection.extra["subject"]
    await backend.audit.searched(gallery, [{"outcome": "identified", "subject": subject}])
    if caller.sees_vectors:
        return rejection
    if caller.rights.may("identify") or caller.rights.may("read"):
        return DuplicateSubjectError(rejection.detail, subject=subject)
    return rejection.redacted()
