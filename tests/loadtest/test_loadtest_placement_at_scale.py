"""Engines that are lost and join, in a simulation with real cores and a real router."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from penstock.loadtest.studies.placement_at_scale import (
    SCALE,
    Course,
    measure,
    picture,
    plays,
    table,
)

SMALL = replace(
    SCALE, engines=8, conversations=160, begin_within=30.0, applications=2, pause=2.0,
    answer=(4, 12), turns=(4, 7),
)  # fmt: skip
BUSY = replace(SMALL, conversations=200, begin_within=14.0)
"""Engines that can do it as long as they find what they have computed before, and fall behind
where chats leave them for others."""


@pytest.fixture(scope="module")
def courses() -> list[Course]:
    return measure(SMALL, engine_tokens=16_000, by_room=True)


@pytest.mark.timeout(240)
def test_engines_that_come_and_go_cost_no_more_than_what_they_held(courses: list[Course]) -> None:
    one, many, lost, by_room = courses
    shown = table(courses)
    assert many.result.hit_rate > 0.93 * one.result.hit_rate, shown
    assert lost.result.hit_rate > 0.9 * one.result.hit_rate, shown
    assert by_room.result.hit_rate < 0.8 * many.result.hit_rate, shown
    assert many.result.requests_imbalance < 1.35, shown


@pytest.mark.timeout(240)
def test_chats_stay_with_busy_engines_that_hold_them() -> None:
    one, many = [play() for play in plays(BUSY, engine_tokens=16_000)[:2]]
    shown = table([one, many])
    assert many.result.hit_rate > 0.93 * one.result.hit_rate, shown
    assert many.result.requests_imbalance < 1.2, shown
    assert many.result.mean_ttft < 0.4, shown


def test_every_request_is_answered_though_its_engine_is_lost(courses: list[Course]) -> None:
    _, many, lost, _ = courses
    assert len(lost.losses) >= 4
    assert lost.continued > 0
    assert lost.result.requests == many.result.requests + lost.continued
    assert len(many.shares) == SMALL.engines


def test_the_picture_shows_each_course_and_each_loss(courses: list[Course]) -> None:
    root = ElementTree.fromstring(picture(courses))
    space = {"svg": "http://www.w3.org/2000/svg"}
    lines = root.findall("svg:polyline", space)
    assert [line.get("class") for line in lines] == ["reference", "first", "second", "other"]
    texts = [text.text for text in root.findall("svg:text", space)]
    assert all(course.name in texts for course in courses)
    marks = [x for x in root.findall("svg:line", space) if x.get("class") == "second"]
    assert len(marks) == len(courses[2].losses)
    dots = [x for x in root.findall("svg:circle", space) if x.get("r") == "2.5"]
    assert len(dots) == sum(len(one.shares) for one in courses if len(one.shares) > 1)
