"""Training with parameters on servers: what a recipe's section `server` asks for.

A run is a few processes: a coordinator, servers, workers, and the supervisor that starts and watches them.

    recipe/      what the section may say, and the job that follows from it
    worker/      reads parameters, computes the gradient of a task, pushes it
    processes/   how processes are born, logged and ended
    supervisor/  starts all of them, replaces who dies, and makes a trained module of what is left
    watch/       what is told of a run while it goes on

Which samples a task has follows from its number alone (`worker.samples`), so anybody may compute it. The worker's loop
knows servers by `exchange.interface` only, and runs the same under a replay.
"""
