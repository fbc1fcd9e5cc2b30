"""Text with blanks as a batch."""

import numpy as np
import pytest

from xlpre.objectives.blanks import hide

TOKENS = np.array([20, 21, 22])


@pytest.mark.parametrize("positions", [[3], [-1], [0, 7], [1, 1]])
def test_only_places_of_the_text_are_hidden_and_each_once(positions):
    with pytest.raises(
        ValueError, match=r"positions \(\[.*\]\) must be places in the text, 0 to 2, none of them twice"
    ):
        hide(TOKENS, np.array(positions))
