"""Signals set a flag; the second of a kind ends the process as it always does, unless it is patient."""

import os
import signal
import subprocess
import sys

from small_runs import FORK

from moonopt.runs.interrupt import stopping, without_interrupts


def test_a_signal_asks_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with stopping() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def _twice(patient):
    with stopping(signal.SIGTERM, patient=patient):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(7)


def test_the_second_signal_ends_the_process_unless_it_is_patient():
    for patient, code in ((False, -signal.SIGTERM), (True, 7)):
        process = FORK.Process(target=_twice, args=(patient,))
        process.start()
        process.join()
        assert process.exitcode == code


def test_processes_started_without_interrupts_never_get_them():
    told, before = "import signal; print(signal.getsignal(signal.SIGINT))", signal.getsignal(signal.SIGINT)
    with without_interrupts():
        child = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert child.stdout == f"{signal.SIG_IGN}\n"
    assert signal.getsignal(signal.SIGINT) is before
