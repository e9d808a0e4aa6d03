"""Traces and the server loop that follows them."""

import itertools

import pytest

from replayssm_jit.cli import CliError
from replayssm_jit.cli.trace import FILL_STEPS, Request, Server, parse_trace, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_default_trace_has_the_same_form():
    trace = read_trace(None)
    assert len(trace) >= 100
    assert trace[0].arrival == 0
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(trace))
    assert all(r.context >= 1 and r.generate >= 1 for r in trace)


def test_production_traces_parse():
    """Seven digits of a second, any order of columns and rows, columns of no interest."""
    lines = [
        "GeneratedTokens,Model,TIMESTAMP,ContextTokens",
        "109,a,2023-11-16 18:15:50.9951690,396",
        "44,a,2023-11-16 18:15:46.6805900,374",
        "5,b,2023-11-16T18:15:51,0",
    ]
    trace = parse_trace(lines, "x.csv")
    assert [(r.context, r.generate) for r in trace] == [(374, 44), (396, 109), (0, 5)]
    assert [r.arrival for r in trace] == pytest.approx([0, 4.314579, 4.31941], abs=1e-5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no column TIMESTAMP"),
        (["TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,1"], "no column GeneratedTokens"),
        ([HEADER], "no requests"),
        ([HEADER, "yesterday,1,1"], "line 2: TIMESTAMP must look like"),
        ([HEADER, "2023-11-16 18:15:46.x,1,1"], "line 2: TIMESTAMP must look like"),
        ([HEADER, "2023-11-16 18:15:46,1,1", "2023-11-16 18:15:46,one,1"], "line 3: token counts must be whole numbers from 0"),
        ([HEADER, "2023-11-16 18:15:46,1,0"], "whole numbers from 1, got '0'"),
        ([HEADER, "2023-11-16 18:15:46,-1,1"], "whole numbers from 0, got '-1'"),
        ([HEADER, "2023-11-16 18:15:46"], "line 2"),
    ],
)
def test_bad_traces(lines, message):
    with pytest.raises(CliError, match=message) as error:
        parse_trace(lines, "x.csv")
    assert "\n" not in error.value.message


def _serve(server, steps, per_step):
    active = []
    for _ in range(steps):
        for slot, _ in server.admit():
            assert slot in server.active
        active.append(len(server.active))
        server.accept({slot: min(per_step, left) for slot, left in server.active.items()})
    return active


def test_busy_server_stays_full_and_conserves_requests():
    trace = read_trace(None)
    server = Server(trace, 16, 1.0)
    active = _serve(server, 3000, 1)
    assert server.admitted == server.finished + len(server.active)
    assert server.finished > len(trace)  # the trace has repeated
    assert active[FILL_STEPS - 1] == 16
    assert sum(active[FILL_STEPS:]) / len(active[FILL_STEPS:]) > 15


def test_requests_generate_what_the_trace_says():
    trace = [Request(i, float(i), 10, 3 + i) for i in range(5)]
    server = Server(trace, 1, 1.0)
    for _ in range(1000):
        server.admit()
        server.accept(dict.fromkeys(server.active, 1))
        if server.finished == 5:
            break
    assert server.generated_tokens == sum(r.generate for r in trace)
    assert server.context_tokens == 50


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_one_request_is_enough(slots):
    server = Server([Request(0, 0.0, 1, 2)], slots, 2.5)
    _serve(server, 100, 2)
    assert server.finished > 0
