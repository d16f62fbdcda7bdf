"""Console page of webhooks: whether they work, a test, and deletion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from playwright.sync_api import expect

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.browser.chromium import faults, overflow
from tests.browser.conftest import PHONE, Opener
from tests.receivers import receiving


def test_a_webhook_is_tested_seen_at_work_and_deleted(visit: Opener, tmp_path: Path) -> None:
    with receiving() as receiver:
        settings = load_settings(data_dir=tmp_path, webhook_hosts=receiver.origin, log_level="ERROR")
        with embedded(settings) as url, Kith(url) as kith:
            page = visit(url, "/settings/webhooks")
            expect(page.get_by_text("No webhooks yet")).to_be_visible()
            kith.create_gallery("door", risk={"threshold": 0.9})
            kith.create_webhook(f"{receiver.origin}/hook", name="Alarm", types=["decision"], galleries=["door"])
            page.get_by_role("button", name="Refresh").click()
            expect(page.get_by_text("working")).to_be_visible()
            page.get_by_role("button", name="Send a test").click()
            expect(page.get_by_text("accepted the test")).to_be_visible()
            receiver.answers += [404] * 4
            for row in np.eye(2, kith.model().dimension):
                kith.identify("door", embeddings=[row])
            receiver.wait_for(2)
            page.get_by_role("button", name="Refresh").click()
            expect(page.get_by_text("the receiver returned status 404")).to_be_visible()
            expect(page.get_by_text("2 events after its position")).to_be_visible()
            page.set_viewport_size(PHONE)
            assert faults(page) == []
            assert overflow(page) == 0
            page.get_by_role("button", name="Delete").click()
            page.get_by_role("dialog").get_by_role("button", name="Delete").click()
            expect(page.get_by_text("No webhooks yet")).to_be_visible()
            assert list(kith.webhooks()) == []
