"""What a site says to those who control it."""

import pytest

from holdfast.core.ids import SiteId
from holdfast.core.layout import Cohort, View
from holdfast.errors import OperatorError
from holdfast.site import wire

from .test_dialling import lonely_site


def view(term: int, number: int) -> View:
    one = (Cohort(0, 1, (SiteId(0),)),)
    return View(term, number, (SiteId(0),), (one, one))


def test_a_failure_is_said_again_to_a_new_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that led may have died before it heard of it; nothing would ever end the flow."""
    site, said = lonely_site(), []
    monkeypatch.setattr(site, "tell", said.append)
    monkeypatch.setattr(site, "_kick", lambda: None)
    site._on_new_view(wire.NewView(view(0, 0), {}))
    error = OperatorError(flow="f", stage="s", operator="o", epoch=1, row="r", cause="c")
    site._fail(error)
    assert [type(m) for m in said if isinstance(m, wire.Failed)] == [wire.Failed]
    said.clear()
    site._on_new_view(wire.NewView(view(0, 1), {}))
    assert not [m for m in said if isinstance(m, wire.Failed)]
    site._on_new_view(wire.NewView(view(1, 2), {}))
    (again,) = [m for m in said if isinstance(m, wire.Failed)]
    assert again.detail["cause"] == "c"
