// Messages between two ranks of one host, with tags: sends and receives under way, driven by whoever has time.
//
// Each pair of ranks has a channel each way. The sender announces a message by an envelope and pours its bytes into a
// ring that the receiver empties; a tensor in the arena is read where it lies. Messages of a pair arrive in the order of
// sending; one that nobody has asked for yet is kept until somebody does.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "members.hpp"

namespace paceline {

constexpr int kAnySource = -1;

std::exception_ptr error_of(const std::string& text);

// A send or receive under way.
struct Message {
  int peer;  // of a receive from anybody: `kAnySource` until it is known
  int64_t tag;
  char* data;
  size_t bytes;
  std::chrono::milliseconds timeout;
  std::function<void(std::exception_ptr)> finish;  // called once, without locks held
  Deadline deadline;
  uint64_t number = 0;   // of a send: which of its channel
  size_t moved = 0;      // bytes
  bool announced = false;
  bool shared = false;
  bool done = false;
  std::exception_ptr error;
};

class Messages {
 public:
  Messages(Members& members, Patience patience);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void send(const std::shared_ptr<Message>& message);
  void receive(const std::shared_ptr<Message>& message);

  // Drive all messages until this one is done.
  void wait(const std::shared_ptr<Message>& message);

  // Stop the thread; what is under way fails.
  void stop();

 private:
  // A message that arrives before it is asked for.
  struct Kept {
    int64_t tag;
    std::vector<char> bytes;
    bool complete = false;
    std::shared_ptr<Message> claimed;
  };
  // What this rank is reading from one channel.
  struct Incoming {
    uint64_t count = 0;    // messages begun
    bool open = false;
    Envelope envelope{};
    size_t moved = 0;
    std::shared_ptr<Message> wanted;
    std::shared_ptr<Kept> kept;
  };
  using Done = std::vector<std::shared_ptr<Message>>;

  void start(const std::shared_ptr<Message>& message, bool sending);
  bool drive(Done& done);
  bool drive_sends(int to, Done& done);
  bool drive_channel(int from, Done& done);
  bool pour(int to, Message& message);
  bool draw(int from, Incoming& incoming);
  void open(int from, Incoming& incoming);
  void close(int from, Incoming& incoming, Done& done);
  bool claim_kept(const std::shared_ptr<Message>& message, Done& done);
  void look_up(Done& done);
  void fail_all(Done& done, const std::exception_ptr& error);
  std::string title(const Message& message, bool sending) const;
  void loop();
  void finish(Done& done);

  Members& members_;
  Patience patience_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by receiver
  std::list<std::shared_ptr<Message>> receives_;             // that no message has met yet
  std::vector<std::list<std::shared_ptr<Kept>>> kept_;       // by sender
  std::vector<Incoming> incoming_;                           // by sender
  std::vector<uint64_t> numbers_;                            // sends so far, by receiver
  int under_way_ = 0;
  int waiting_ = 0;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace paceline
