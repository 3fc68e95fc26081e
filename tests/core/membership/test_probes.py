"""Who may answer a probe, and when it is due."""

from __future__ import annotations

from core.made import in_order

from meshagent.core.membership.probes import RELAYS_MAX, Probe, Probes, Relay

ANN, BEN, CAT = (each.agent for each in in_order("ann", "ben", "cat"))


def test_only_the_target_or_a_helper_that_was_asked_can_answer() -> None:
    probes = Probes()
    seq = probes.start(ANN, 0.0, 1.0, 2.0)
    assert probes.answered(seq, BEN) is None
    (late,) = probes.late(1.0)
    late.helpers = (BEN,)
    assert probes.answered(seq, CAT) is None
    assert isinstance(probes.answered(seq, BEN), Probe)
    assert probes.answered(seq, ANN) is None, "it has ended"


def test_a_probe_for_somebody_else_is_answered_by_its_target_alone() -> None:
    probes = Probes()
    relay = Relay(BEN, ANN, 7, 1.0)
    seq = probes.start_relay(relay)
    assert seq is not None
    assert probes.answered(seq, BEN) is None
    assert probes.answered(seq, ANN) == relay


def test_probes_for_others_are_limited_and_end_in_time() -> None:
    probes = Probes()
    started = [probes.start_relay(Relay(BEN, ANN, n, 1.0)) for n in range(RELAYS_MAX + 1)]
    assert started[-1] is None
    assert len(probes.expired_relays(1.0)) == RELAYS_MAX
    assert probes.start_relay(Relay(BEN, ANN, 1, 2.0)) is not None


def test_a_probe_is_due_when_helpers_are_to_be_asked_and_when_it_fails() -> None:
    probes = Probes()
    probes.start(ANN, 0.0, 1.0, 2.0)
    assert probes.deadlines() == [1.0]
    (late,) = probes.late(1.0)
    late.helpers = ()
    assert probes.deadlines() == [2.0]
