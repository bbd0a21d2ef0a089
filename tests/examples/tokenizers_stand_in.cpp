// For tests only: the C interface of mlc-ai/tokenizers-cpp (tokenizers_c.h), answered by the tokenizers package of a
// Python process. TOPW_TEST_PYTHON and TOPW_TEST_SERVER name the interpreter and tokenizers_server.py.
//
// A call is one byte (which), 32 bits (the flag), 64 bits (size) and so many bytes; an answer is 64 bits and so many
// bytes. Size ~0 of an answer: the package refused.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

extern char **environ;

namespace {

constexpr std::uint64_t kRefused = ~std::uint64_t{0};

struct Server {
  pid_t process = 0;
  int to = -1, from = -1;
  std::string decoded, token;

  Server() {
    int calls[2], answers[2];
    if (pipe(calls) != 0 || pipe(answers) != 0) std::abort();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, calls[0], 0);
    posix_spawn_file_actions_adddup2(&actions, answers[1], 1);
    for (const int end : {calls[0], calls[1], answers[0], answers[1]})
      posix_spawn_file_actions_addclose(&actions, end);
    char *arguments[] = {std::getenv("TOPW_TEST_PYTHON"), std::getenv("TOPW_TEST_SERVER"), nullptr};
    if (posix_spawn(&process, arguments[0], &actions, nullptr, arguments, environ) != 0) std::abort();
    posix_spawn_file_actions_destroy(&actions);
    close(calls[0]);
    close(answers[1]);
    to = calls[1];
    from = answers[0];
  }
  ~Server() {
    close(to);
    close(from);
    waitpid(process, nullptr, 0);
  }

  void send(const void *data, std::size_t size) const {
    for (auto at = static_cast<const char *>(data); size > 0;) {
      const ssize_t written = write(to, at, size);
      if (written <= 0) std::abort();
      at += written;
      size -= std::size_t(written);
    }
  }
  void receive(void *data, std::size_t size) const {
    for (auto at = static_cast<char *>(data); size > 0;) {
      const ssize_t got = read(from, at, size);
      if (got <= 0) std::abort();
      at += got;
      size -= std::size_t(got);
    }
  }
  // Whether the package answered.
  bool call(char which, std::uint32_t flag, const void *data, std::uint64_t size, std::string &answer) const {
    send(&which, 1);
    send(&flag, sizeof flag);
    send(&size, sizeof size);
    send(data, size);
    std::uint64_t got = 0;
    receive(&got, sizeof got);
    if (got == kRefused) return false;
    answer.resize(got);
    receive(answer.data(), got);
    return true;
  }
  std::string must(char which, std::uint32_t flag, const void *data, std::uint64_t size) const {
    std::string answer;
    if (!call(which, flag, data, size, answer)) std::abort();  // as the real one does
    return answer;
  }
};

Server &server(void *handle) { return *static_cast<Server *>(handle); }

}  // namespace

extern "C" {

struct TokenizerEncodeResult {
  int *token_ids;
  size_t len;
};

void *tokenizers_new_from_str(const char *json, size_t len) {
  auto *made = new Server;
  std::string answer;
  if (made->call('n', 0, json, len, answer)) return made;
  delete made;
  return nullptr;
}

void tokenizers_encode(void *handle, const char *data, size_t len, int add_special_token,
                       TokenizerEncodeResult *result) {
  const std::string ids = server(handle).must('e', std::uint32_t(add_special_token), data, len);
  result->len = ids.size() / sizeof(int);
  result->token_ids = new int[result->len];
  std::memcpy(result->token_ids, ids.data(), ids.size());
}

void tokenizers_free_encode_results(TokenizerEncodeResult *results, size_t num_seqs) {
  for (size_t i = 0; i < num_seqs; ++i) delete[] results[i].token_ids;
}

void tokenizers_decode(void *handle, const uint32_t *data, size_t len, int skip_special_token) {
  server(handle).decoded = server(handle).must('d', std::uint32_t(skip_special_token), data, len * sizeof *data);
}

void tokenizers_get_decode_str(void *handle, const char **data, size_t *len) {
  *data = server(handle).decoded.data();
  *len = server(handle).decoded.size();
}

void tokenizers_token_to_id(void *handle, const char *token, size_t len, int32_t *id) {
  const std::string answer = server(handle).must('t', 0, token, len);
  std::memcpy(id, answer.data(), sizeof *id);
}

void tokenizers_id_to_token(void *handle, uint32_t id, const char **data, size_t *len) {
  server(handle).token = server(handle).must('i', 0, &id, sizeof id);
  *data = server(handle).token.data();
  *len = server(handle).token.size();
}

void tokenizers_free(void *handle) { delete static_cast<Server *>(handle); }

}  // extern "C"
