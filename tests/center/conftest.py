"""Fixtures of the suites of remote centers."""

import pytest

from remote import Service
from springline.center import Layout


@pytest.fixture
def serve(request, monkeypatch):
    """`serve(rule, values, buffers)` makes a center in this process; by default of `VALUES`."""
    monkeypatch.setattr("springline.center.remote.peer._PAUSE", 0.001)
    services = []

    def serve(rule=None, values=None, buffers=None, **options):
        rule = rule or request.module.RULE
        values = request.module.VALUES if values is None else values
        given = Layout.of(values, buffers, rule.fragments), rule, values | (buffers or {})
        options = {"use_locking": True, "restore": None, "shards": 2} | options
        services.append(Service(*given, **options))
        return services[-1]

    yield serve
    for service in services:
        service.close()
