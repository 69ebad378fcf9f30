"""Releases: an allow-list export, a safe push, a card from the statement, a check that anybody can run, and loading."""

from raptor_hf.hub.load import load_release
from raptor_hf.hub.push import push_release
from raptor_hf.hub.release import export_release
from raptor_hf.hub.scrub import Leak, scrub_check
from raptor_hf.hub.verify import VerificationReport, verify_release

__all__ = [
    "Leak",
    "VerificationReport",
    "export_release",
    "load_release",
    "push_release",
    "scrub_check",
    "verify_release",
]
