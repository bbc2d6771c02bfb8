// All that needs PyTorch's headers, in one piece: to read these takes a compiler longer than all our code.
#include "c10d/work.cpp"
#include "c10d/group.cpp"
#include "c10d/group_collectives.cpp"
#include "c10d/started.cpp"
#include "c10d/levels.cpp"
#include "c10d/hierarchy_collectives.cpp"
#include "c10d/hierarchy.cpp"
#include "c10d/bindings.cpp"
