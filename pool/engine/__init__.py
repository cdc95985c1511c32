"""Pure scheduler: the same snapshot, policy and moment in give the same plan out. No Django, no clock, no
database.
"""
