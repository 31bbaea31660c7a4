"""Axis 4: more than one device. The first comes with chapter 08."""
