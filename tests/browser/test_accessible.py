"""Accessibility: axe, window widths, keyboard, motion and forced colors."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.chromium import faults
from tests.browser.conftest import LONG, Opener, go

PLACES = {
    "identify": "/identify",
    "enroll": "/enroll",
    "compare": "/compare",
    "galleries": "/galleries",
    "gallery": "/galleries/family",
    "gallery of a long name": "/galleries/long",
    "empty gallery": "/galleries/empty",
    "no such gallery": "/galleries/nowhere",
    "albums": "/galleries/family/albums",
    "no such album": f"/galleries/family/albums/{'0' * 32}",
    "risk": "/galleries/family/risk",
    "hygiene": "/galleries/family/hygiene",
    "settings": "/galleries/family/settings",
    "person": "/galleries/family/subjects/ada",
    "person of a long name": f"/galleries/long/subjects/{LONG}",
    "no such person": "/galleries/family/subjects/nobody",
    "jobs": "/jobs",
    "health": "/health",
    "keys": "/settings/keys",
    "audit": "/settings/audit",
    "webhooks": "/settings/webhooks",
    "no such page": "/elsewhere",
    "no address": "/galleries/%E0%A4",
}
WIDTHS = {"light": (320, 640, 1280), "dark": (390, 1280)}
"""Widths of the window by theme: 640 is that of 1280 at 200 % zoom."""


def settled(page: Page) -> None:
    """Wait until the page has loaded its data."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.locator(".waiting")).to_have_count(0)


def test_axe_finds_no_fault_in_either_theme_and_nothing_is_too_wide(visit: Opener, populated: str) -> None:
    """Each page has a name of its own and one first heading. Pages without data share the name of their kind."""
    page = visit("", populated)
    found, names = [], set()
    for name, place in PLACES.items():
        go(page, place)
        settled(page)
        assert page.get_by_role("heading", level=1).count() == 1, name
        names.add(page.title())
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            for width in WIDTHS[theme]:
                page.set_viewport_size({"width": width, "height": 800})
                found += [f"{name}, {theme} {width}: {fault}" for fault in faults(page)]
        if name == "gallery of a long name":
            row = page.get_by_role("row").filter(has_text=LONG).bounding_box()
            assert row and row["height"] < 60  # one line
            assert page.get_by_role("region", name="People").evaluate("(one) => one.scrollWidth - one.clientWidth") == 0
        if name.startswith("no such"):
            expect(page.get_by_role("main").get_by_role("button")).to_have_count(0)
        if name == "no such album":
            expect(page.get_by_role("heading", name="This album is gone")).to_be_visible()
        if name == "risk":
            page.set_viewport_size({"width": 360, "height": 800})
            page.wait_for_function(  # the chart is drawn again
                "(words) => { const [errors, strict] = words.map((one) => [...document.querySelectorAll('.chart text')]"
                ".find((text) => text.textContent.includes(one))?.getBoundingClientRect());"
                "return errors?.right + 8 <= strict?.left; }",
                arg=["more m", "strict"],
            )
    assert found == []
    assert len(names) >= len(PLACES) - 5


def test_the_focus_is_where_a_person_without_a_mouse_expects_it(visit: Opener, populated: str) -> None:
    page = visit("/nowhere", populated)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.get_by_role("link", name="Go to the start page").click()
    expect(page.get_by_role("heading", level=1, name="Identify")).to_be_visible()
    page.get_by_role("link", name="Galleries").click()
    expect(page.get_by_role("heading", name="Galleries", level=1)).to_be_focused()
    expect(page.get_by_role("link", name="Galleries")).to_have_attribute("aria-current", "page")

    opener, dialog = page.get_by_role("button", name="Your key"), page.get_by_role("dialog", name="Your key")
    opener.focus()
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("link", name="Manage keys")).to_be_focused()
    assert faults(page) == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(opener).to_be_focused()

    opener.click()
    expect(dialog).to_be_visible()
    page.mouse.click(5, 5)  # beside it
    expect(dialog).to_have_count(0)


def test_settings_of_the_person_s_device_are_followed(visit: Opener, populated: str) -> None:
    page = visit("", populated, color_scheme="dark", reduced_motion="reduce")
    settled(page)
    moving = "document.getAnimations().filter((one) => one.effect.getComputedTiming().duration > 5).length"
    assert page.evaluate(moving) == 0
    page.get_by_role("link", name="API reference").click()
    expect(page.locator("html")).to_have_class("dark-mode")
    page.go_back()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) != dark
    page.emulate_media(forced_colors="active")  # the place is still marked in the person's own colors
    outline = "(one) => getComputedStyle(one).outlineStyle"
    assert page.get_by_role("link", name="Identify", exact=True).evaluate(outline) == "solid"
    assert page.get_by_role("link", name="Jobs").evaluate(outline) == "none"
    for is_phone in (False, True):  # a phone does not mention keys that it lacks
        page = visit("/identify", populated, has_touch=is_phone, is_mobile=is_phone)
        expect(page.get_by_text("Ctrl+V")).to_be_visible(visible=not is_phone)
    page = visit("/galleries/family/settings", populated, viewport={"width": 240, "height": 800})  # large text
    tab = page.get_by_role("navigation", name="Pages of family").get_by_role("link", name="Settings")
    expect(tab).to_be_in_viewport(ratio=0.99)  # a fraction of a pixel is rounded away
