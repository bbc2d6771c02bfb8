"""A module that begins a thread when it is loaded: a fork afterwards would lack it."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
