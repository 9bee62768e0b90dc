"""What tests of the console share."""

from __future__ import annotations

import pytest
from view_samples import make_snapshot, make_view

from allocator.snapshot import Counters
from kvtop.model.view import View


@pytest.fixture
def full_view(make_arrays) -> View:
    """Return a view of an engine with both tiers, in which every number is another."""
    counters = Counters()
    for number, field in enumerate(Counters.__struct_fields__, start=101):
        if isinstance(getattr(counters, field), int):
            setattr(counters, field, number)
    return make_view(make_snapshot(counters=counters), make_arrays("ffca"), make_arrays("fa"))
