"""When our thread lets libzmq's go first: as long as nobody else takes the time."""

from __future__ import annotations

from meshagent.transports.zmq.cpu_yield import PAUSE_S, PAUSE_S_MAX, SLOW_S, CpuYield


class Machine:
    """A clock, and somebody who takes so long when we give way."""

    def __init__(self, takes_s: float) -> None:
        self.now, self.takes_s, self.given = 100.0, takes_s, 0
        self.yield_cpu = CpuYield(self._yield_cpu, lambda: self.now)

    def _yield_cpu(self) -> None:
        self.given += 1
        self.now += self.takes_s


def test_it_gives_way_each_time_while_that_is_cheap() -> None:
    machine = Machine(SLOW_S / 2)
    for _ in range(10):
        machine.yield_cpu()
    assert machine.given == 10


def test_a_busy_machine_costs_a_few_ms_in_a_second_and_ever_less() -> None:
    machine = Machine(0.003)
    lost_in_first, began = 0, machine.now
    while machine.now < began + 1000.0:
        machine.yield_cpu()
        machine.now += 0.01
        if machine.now < began + 1.0:
            lost_in_first = machine.given
    assert lost_in_first == 1
    assert machine.given < 10 + 1000.0 / PAUSE_S_MAX


def test_it_gives_way_again_when_the_machine_is_quiet() -> None:
    machine = Machine(0.003)
    machine.yield_cpu()
    machine.takes_s = 0.0
    machine.yield_cpu()
    assert machine.given == 1, "it rests"
    machine.now += PAUSE_S
    for _ in range(5):
        machine.yield_cpu()
    assert machine.given == 6


def test_where_nobody_can_yield_cpu_nothing_happens() -> None:
    CpuYield(None)()
