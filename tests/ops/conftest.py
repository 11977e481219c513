"""Operations on a GPU are interpreted where there is none."""

from tests.support.interpreter import hasten

hasten()
