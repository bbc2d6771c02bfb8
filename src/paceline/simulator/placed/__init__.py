"""Placed programs and their schedules in virtual time, call by call, on described machines and on this one."""
