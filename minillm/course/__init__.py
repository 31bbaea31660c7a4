"""What turns the package into a course.

notebooks.py   runs chapters in place and stores their outputs
"""
