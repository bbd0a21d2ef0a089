// Scratch memory shared by the threads of a session.
#ifndef TOPW_ORT_WORKSPACES_H
#define TOPW_ORT_WORKSPACES_H

#include <stdlib.h>

#include <atomic>

#include "topw.h"

namespace topw {

// The unused workspaces. `take` creates one if all are in use, so there are as many as threads ever ran at once.
class Workspaces {
 public:
  struct Entry {
    topw_workspace *workspace;
    Entry *next;
  };

  ~Workspaces() {
    while (Entry *entry = free_) {
      free_ = entry->next;
      topw_workspace_destroy(entry->workspace);
      free(entry);
    }
  }

  Entry *take() {
    lock();
    Entry *entry = free_;
    if (entry) free_ = entry->next;
    unlock();
    if (entry) return entry;
    topw_workspace *workspace = topw_workspace_create();
    if (!workspace) return nullptr;
    entry = static_cast<Entry *>(malloc(sizeof(Entry)));
    if (!entry) {
      topw_workspace_destroy(workspace);
      return nullptr;
    }
    *entry = {workspace, nullptr};
    return entry;
  }

  void give_back(Entry *entry) {
    lock();
    entry->next = free_;
    free_ = entry;
    unlock();
  }

 private:
  void lock() {  // held for two assignments
    while (busy_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { busy_.clear(std::memory_order_release); }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Entry *free_ = nullptr;
};

}  // namespace topw

#endif
