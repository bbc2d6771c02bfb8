"""How properties are tested, here and on ranks, each of which draws the same examples in a process of its own.

No example has a deadline, and examples may be slow to draw: on a busy machine either would tell of the machine. A rank
that missed a deadline would even try its example again, alone, while the others go on to the next. Examples are the
same every time, so that a failure is one of what was changed; others are drawn, for as long as one likes, by

    python -m pytest --hypothesis-profile=other tests/FILE
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("other", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("other"), derandomize=True)
settings.load_profile("same")
