"""The tolerance rule lives in the package, for users and contributors too; tests import it from here."""

from fast_layers.testing.closeness import assert_bitwise_equal as assert_bitwise_equal
from fast_layers.testing.closeness import assert_close as assert_close
from fast_layers.testing.closeness import assert_close_over_draws as assert_close_over_draws
from fast_layers.testing.closeness import assert_trees_close as assert_trees_close
from fast_layers.testing.closeness import judge as judge
from fast_layers.testing.closeness import stack as stack
from fast_layers.testing.closeness import ulp as ulp
