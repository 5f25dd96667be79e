"""Variance-based compression, alone and with Strom's threshold."""

from thinwire.methods.variance.variance import Variance as Variance
from thinwire.methods.variance.variance_strom import VarianceStrom as VarianceStrom
