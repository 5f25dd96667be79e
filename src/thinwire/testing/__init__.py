"""The laws that every reducer keeps, as a kit for anybody's: `thinwire.testing.check(MyReducer(...))`.

Here: the laws, what they are tried on, and errors on purpose. It may touch all that a method runs on, up to the step.
"""

from thinwire.testing.atomicity import same_state as same_state
from thinwire.testing.cases import STEPS as STEPS
from thinwire.testing.cases import WORLDS as WORLDS
from thinwire.testing.laws import check as check
from thinwire.testing.laws import check_by_turns as check_by_turns
