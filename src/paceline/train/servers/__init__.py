"""Training with parameters on servers: what a recipe's section `server` asks for.

A run is a few processes: a coordinator, servers, workers, and the supervisor that starts and watches them
(`supervise`). A worker reads parameters, computes the gradient of a *task*, and pushes it (`worker`); which samples a
task has follows from its number alone (`samples`), so anybody may compute it. The loop knows servers by
`exchange.interface` only, and runs the same under a replay.
"""
