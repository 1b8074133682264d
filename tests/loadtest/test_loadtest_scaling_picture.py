"""The picture of speeds on several GPUs."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from penstock.loadtest.studies.scaling_picture import draw, line, main

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_that_doubles_lies_on_the_dashed_one() -> None:
    root = ElementTree.fromstring(draw("W1", [line("B, TP: 2:1=100,2=200,4=400")]))
    [found] = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in found.attrib["points"].split()]
    [dashed] = [each for each in root.iter(f"{SVG}line") if each.get("class") == "limit"]
    x1, y1, x2, y2 = (float(dashed.attrib[name]) for name in ("x1", "y1", "x2", "y2"))
    assert points == [(x1, y1), ((x1 + x2) / 2, (y1 + y2) / 2), (x2, y2)]
    assert "B, TP: 2" in "".join(root.itertext())


def test_a_line_whose_first_place_has_two_gpus_starts_at_twice() -> None:
    root = ElementTree.fromstring(draw("W1", [line("a:1=1,2=2"), line("b:2=70,4=100")]))
    one, other = (each.attrib["points"].split() for each in root.iter(f"{SVG}polyline"))
    assert other[0] == one[1]


@pytest.mark.parametrize("given", ["B", "B:", ":1=2", "B:1", "B:2=1,1=1", "B:0=1", "B:1=-1"])
def test_a_line_that_cannot_be_read_is_refused_by_its_text(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--title", "W1", given])
    assert ended.value.code == 2
    assert given in capsys.readouterr().err
