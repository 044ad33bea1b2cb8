"""Attention for Hopper (sm_90a) in Gluon: TMA, warpgroup MMA, specialised warps.

Not served yet: `dispatch` does not know it.
"""
