"""Console page of webhooks: creation, test, deliveries and deletion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.browser.chromium import faults, overflow
from tests.browser.conftest import Opener
from tests.receivers import Receiver, receiving


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, Receiver]]:
    """A service with a gallery, and the receiver that it may send to."""
    with receiving() as receiver:
        settings = load_settings(data_dir=tmp_path, webhook_hosts=receiver.origin, log_level="ERROR")
        with embedded(settings) as url, Kith(url) as kith:
            kith.create_gallery("door", risk={"threshold": 0.9})
            yield url, receiver


def test_a_webhook_is_created_tested_seen_at_work_and_deleted(visit: Opener, place: tuple[str, Receiver]) -> None:
    service, receiver = place
    page = visit(service)
    page.goto(f"{service}/console#/settings/webhooks")
    expect(page.get_by_text("No webhooks yet")).to_be_visible()
    page.get_by_role("button", name="Create a webhook").click()
    form = page.get_by_role("dialog")
    form.get_by_label("Address").fill("https://elsewhere.example/")
    form.get_by_role("button", name="Create", exact=True).click()
    expect(form.get_by_text("webhook_refused")).to_be_visible()
    form.get_by_label("Address").fill(f"{receiver.origin}/hook")
    form.get_by_label("Name").fill("Alarm")
    form.get_by_label("decision", exact=True).check()
    form.get_by_label("unknown", exact=True).check()
    form.get_by_label("door", exact=True).check()
    form.get_by_role("button", name="Create", exact=True).click()
    secret = page.get_by_role("textbox", name="Secret").input_value()
    page.get_by_role("button", name="Done").click()
    with Kith(service) as kith:
        (made,) = kith.webhooks()
        assert (made.name, made.types, made.outcomes, made.galleries) == ("Alarm", ["decision"], ["unknown"], ["door"])
        expect(page.get_by_text("working")).to_be_visible()
        page.get_by_role("button", name="Send a test").click()
        expect(page.get_by_text("accepted the test")).to_be_visible()
        receiver.answers += [404] * 4
        for row in np.eye(2, kith.model().dimension):
            kith.identify("door", embeddings=[row])
        test, first = receiver.wait_for(2)[:2]
        assert all(message.is_signed_by(secret) for message in (test, first))
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_text("the receiver returned status 404")).to_be_visible()
        expect(page.get_by_text("2 events after its position")).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        assert faults(page) == []
        assert overflow(page) == 0
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_text("No webhooks yet")).to_be_visible()
        assert list(kith.webhooks()) == []
