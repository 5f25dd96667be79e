"""ExDyna: the method, how the vector is cut among workers, what they pick, how thresholds follow the density."""

from thinwire.methods.exdyna.method import ExDyna as ExDyna
from thinwire.methods.exdyna.state import ExDynaState as ExDynaState
