// ps-lite as a peer of the benchmark: one server that has a dense tensor and rows, and a worker that pushes and pulls.
//
// Called from Python through ctypes, so that its worker is timed like everybody else's. Nothing is applied: the handler
// takes what is pushed where it was received, and answers pulls from memory that is there already, both without a copy.

#include <cstdint>

#include "ps/ps.h"

namespace {

using Values = ps::KVPairs<float>;

constexpr int kDense = 0, kRows = 1;  // commands

ps::KVServer<float>* server;
ps::KVWorker<float>* worker;
ps::SArray<float> held[2];  // what is pulled, by command
Values pushed;

void Handle(const ps::KVMeta& request, const Values& data, ps::KVServer<float>* from) {
  Values answer;
  if (request.push) {
    pushed = data;
  } else {
    answer.keys = data.keys;
    answer.vals = held[request.cmd];
  }
  from->Response(request, answer);
}

template <typename T>
ps::SArray<T> Borrowed(T* data, size_t count) {
  return ps::SArray<T>(data, count, false);
}

}  // namespace

extern "C" {

// Be the scheduler until the others have ended.
void paceline_schedule() {
  ps::Start(0);
  ps::Finalize(0, true);
}

// Be the server until the worker has ended. dense, values: what is pulled, kept by the caller meanwhile.
void paceline_serve(float* dense, size_t dense_count, float* values, size_t value_count) {
  held[kDense] = Borrowed(dense, dense_count);
  held[kRows] = Borrowed(values, value_count);
  ps::StartAsync(0);
  server = new ps::KVServer<float>(0);
  server->set_request_handle(Handle);
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup + ps::kServerGroup + ps::kScheduler);
  ps::Finalize(0, true);
  delete server;
}

// Be the worker; returns when the server can be asked.
void paceline_connect() {
  ps::StartAsync(0);
  worker = new ps::KVWorker<float>(0, 0);
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup + ps::kServerGroup + ps::kScheduler);
}

// Push values of sorted keys, all of one length, and wait until the server has them.
void paceline_push(int command, uint64_t* keys, size_t key_count, float* values, size_t value_count) {
  worker->Wait(worker->ZPush(Borrowed(keys, key_count), Borrowed(values, value_count), {}, command));
}

// Pull the values of sorted keys into memory that is there already, and wait for them.
void paceline_pull(int command, uint64_t* keys, size_t key_count, float* values, size_t value_count) {
  auto into = Borrowed(values, value_count);
  worker->Wait(worker->ZPull(Borrowed(keys, key_count), &into, nullptr, command));
}

// Let the others end.
void paceline_close() {
  ps::Finalize(0, true);
  delete worker;
}

}  // extern "C"
