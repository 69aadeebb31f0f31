// SPDX-License-Identifier: Apache-2.0
// kvmctl snapshot export and import: a snapshot out of the directories of a kvmd that is stopped
// into a file, and out of a file into such directories.
#include <fmt/format.h>
#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/request.h"
#include "base/size_text.h"
#include "engine/run/snapshot_label.h"
#include "engine/space/validate.h"
#include "tiers/disk/data_directory.h"
#include "tiers/disk/disk_tier.h"
#include "tiers/disk/disk_view.h"
#include "tiers/disk/object_file.h"
#include "tiers/disk/object_transfer.h"
#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/offline.h"

namespace kvm::tools {
namespace {

struct FileOptions {
  std::string name;  // of an import: "": as it is in the file
  std::string file;
  std::vector<std::string> directories;
  std::optional<std::string> user;
  std::string capacity;
  std::string config;
  bool replaces = false;
};

void need(const Status& status) {
  if (!status.is_ok()) {
    fail_offline(status);
  }
}

template <typename T>
T need(Result<T> result) {
  need(result.status());
  return std::move(result).value();
}

// Whose snapshots of that name there are instead.
Status no_snapshot(const tiers::DiskView& view, const engine::SnapshotName& name) {
  std::vector<std::string> others;
  for (const tiers::FoundObject& object : view.found().objects) {
    const auto other = engine::parse_snapshot_key(object.key);
    if (other && other->name == name.name) {
      others.push_back(user_name(other->uid));
    }
  }
  return Status(KVM_ERR_NOT_FOUND,
                fmt::format("{} has no snapshot '{}' there{}", user_text(name.uid), name.name,
                            others.empty() ? std::string()
                                           : fmt::format("; --user {} has one",
                                                         fmt::join(others, ", or --user "))));
}

int run_export(const Common& common, const FileOptions& options) {
  const engine::SnapshotName name{
      .uid = options.user ? parse_user(*options.user) : static_cast<uint32_t>(::getuid()),
      .name = options.name};
  const auto view = need(tiers::DiskView::open(options.directories));
  const tiers::FoundObject* const object = view->object(engine::snapshot_key(name));
  if (object == nullptr) {
    fail_offline(no_snapshot(*view, name));
  }
  Progress progress("exporting");
  const auto exported =
      tiers::export_object(view.get(), *object, options.file, options.replaces,
                           [&](uint64_t n_done, uint64_t n_all) { progress.show(n_done, n_all); });
  progress.begin("");
  if (exported.status().code() == KVM_ERR_EXISTS) {
    fail_offline(Status(KVM_ERR_EXISTS, fmt::format("{}: give another FILE, or --replace",
                                                    exported.status().message())));
  }
  const uint64_t file_bytes = need(exported);
  if (common.json) {
    print_json({{"name", name.name},
                {"uid", name.uid},
                {"file", options.file},
                {"pages", object->n_pages},
                {"bytes", file_bytes}});
  } else {
    fmt::print("exported '{}' of {} to {}: {}\n", name.name, user_text(name.uid), options.file,
               bytes_text(file_bytes));
  }
  return kExitOk;
}

// disk.capacity as a kvmd has it that would be started here: bytes, or a share ("50%").
std::string capacity_text(const FileOptions& options) {
  std::vector<std::string> arguments;
  if (!options.config.empty()) {
    arguments = {"--config", options.config};
  }
  if (!options.capacity.empty()) {
    arguments.insert(arguments.end(), {"--disk-capacity", options.capacity});
  }
  for (const Json& option : options_here(std::move(arguments))) {
    if (option.value("name", "") == "disk.capacity" && option["value"].is_string()) {
      return option["value"].get<std::string>();
    }
  }
  fail("kvmd's options are not those that this kvmctl understands", kExitService);
}

uint64_t capacity_of(const std::string& text, uint64_t whole_bytes) {
  if (!text.ends_with('%')) {
    return need(parse_bytes(text));
  }
  double percent = 0;
  (void)std::from_chars(text.data(), text.data() + text.size() - 1, percent);
  return static_cast<uint64_t>(static_cast<double>(whole_bytes) * percent / 100);
}

// kvmd has to be able to use what is made in its directories. So root makes it as the user whose
// they are.
void become_owner(const std::vector<std::string>& directories) {
  std::optional<struct stat> owner;
  for (const std::string& path : directories) {
    struct stat about {};
    if (::stat(path.c_str(), &about) != 0) {
      continue;  // taking it will say what is wrong
    }
    if (owner && owner->st_uid != about.st_uid) {
      fail_offline(Status(KVM_ERR_PERMISSION,
                          fmt::format("{} is of {}, and {} of {}: the directories of a kvmd are "
                                      "those of the user that it runs as",
                                      directories.front(), user_text(owner->st_uid), path,
                                      user_text(about.st_uid))));
    }
    owner = about;
  }
  if (::geteuid() == 0 && owner && owner->st_uid != 0 &&
      (::setgroups(0, nullptr) != 0 || ::setegid(owner->st_gid) != 0 ||
       ::seteuid(owner->st_uid) != 0)) {
    fail_offline(
        Status(KVM_ERR_PERMISSION, fmt::format("the directories are of {}, whom this process may "
                                               "not act as: {}",
                                               user_text(owner->st_uid), std::strerror(errno))));
  }
}

bool has_object(const tiers::ObjectStore& store, const std::string& key) {
  constexpr size_t kAtATime = 1000;
  std::string after;
  for (;;) {
    const std::vector<tiers::ObjectInfo> infos = store.list(after, kAtATime);
    for (const tiers::ObjectInfo& info : infos) {
      if (info.key == key) {
        return true;
      }
    }
    if (infos.size() < kAtATime) {
      return false;
    }
    after = infos.back().key;
  }
}

// Of the file as a whole: what is not as it was written never gets as far as a directory.
void verify(tiers::ObjectFileReader* file, const FileOptions& options, Progress* progress) {
  progress->begin("verifying");
  uint64_t n_done = 0;
  const tiers::ObjectFileHead& head = file->head();
  const Status status = file->read_pages([&](uint32_t, std::span<const std::byte> page) {
    n_done += page.size();
    progress->show(n_done, head.page_bytes);
    return Status::ok();
  });
  progress->begin("");
  need(status);
  const tiers::ObjectInfo info{.key = head.key, .label = head.label};
  const auto snapshot = engine::snapshot_info(info);
  if (!snapshot || snapshot->space_name.empty()) {
    fail_offline(Status(KVM_ERR_INVALID, options.file + " holds no snapshot that this program "
                                                        "knows"));
  }
  if (const std::string wrong = wrong_with_body(head.key, head.n_pages, head.body);
      !wrong.empty()) {
    fail_offline(Status(KVM_ERR_CORRUPT, options.file + ": " + wrong));
  }
}

// Takes the directories as kvmd does.
std::unique_ptr<tiers::DiskTier> open_tier(const FileOptions& options,
                                           const tiers::ObjectFileHead& head) {
  const std::string capacity = capacity_text(options);
  become_owner(options.directories);
  auto directories = need(tiers::open_directories(options.directories));
  const uint64_t whole_bytes = need(tiers::free_bytes(directories));
  const uint64_t capacity_bytes = capacity_of(capacity, whole_bytes);
  auto tier =
      need(tiers::DiskTier::open_in(std::move(directories), {.directories = options.directories,
                                                             .capacity_bytes = capacity_bytes}));
  const uint64_t used_bytes = static_cast<const tiers::SlowTier&>(*tier).used_bytes();
  const uint64_t needed_bytes = tiers::import_bytes(head);
  const bool is_capacity = capacity_bytes <= whole_bytes;
  const uint64_t limit_bytes = std::min(tier->stats().capacity_bytes, whole_bytes);
  if (used_bytes + needed_bytes > limit_bytes) {
    tier.reset();
    fail_offline(Status(
        KVM_ERR_NO_SPACE,
        fmt::format(
            "it takes {} beside {} that are there{}, and {} is {}", bytes_text(needed_bytes),
            bytes_text(used_bytes),
            options.replaces ? " (one that is replaced goes after the new one is there)" : "",
            is_capacity ? "disk.capacity" : "what the file systems have",
            bytes_text(limit_bytes))));
  }
  return tier;
}

int run_import(const Common& common, const FileOptions& options) {
  Progress progress("verifying");
  auto file = need(tiers::ObjectFileReader::open(options.file));
  verify(&file, options, &progress);
  engine::SnapshotName name = *engine::parse_snapshot_key(file.head().key);
  if (!options.name.empty()) {
    name.name = options.name;
    if (name.name.starts_with(engine::kPrefixSnapshots)) {
      fail_offline(Status(KVM_ERR_INVALID,
                          fmt::format("the name is '{}'; names that begin with {} are those of "
                                      "prefixes, which kvmd gives them itself",
                                      name.name, engine::kPrefixSnapshots)));
    }
  }
  if (options.user) {
    name.uid = parse_user(*options.user);
  }
  need(engine::check_snapshot_request({.verb = SnapshotVerb::kSave, .name = name.name}));
  progress.begin("opening");
  std::unique_ptr<tiers::DiskTier> tier = open_tier(options, file.head());
  tiers::SlowTier& pages = *tier;
  const std::string key = engine::snapshot_key(name);
  Status status;
  if (!options.replaces && has_object(*pages.objects(), key)) {
    status = Status(KVM_ERR_EXISTS,
                    fmt::format("{} has a snapshot '{}' there already: give another --name, or "
                                "--replace",
                                user_text(name.uid), name.name));
  } else {
    progress.begin("importing");
    status = tiers::import_object(
        &pages, &file, key, [&](uint64_t n_done, uint64_t n_all) { progress.show(n_done, n_all); });
  }
  progress.begin("");
  tier.reset();  // what it has taken and does not need goes
  need(status);
  const uint64_t n_bytes = file.head().page_bytes + file.head().body.size();
  if (common.json) {
    print_json({{"name", name.name},
                {"uid", name.uid},
                {"pages", file.head().n_pages},
                {"bytes", n_bytes}});
  } else {
    fmt::print("imported '{}' of {}: {}\n", name.name, user_text(name.uid), bytes_text(n_bytes));
  }
  return kExitOk;
}

void add_directories(CLI::App* command, FileOptions* options) {
  command
      ->add_option("--dir", options->directories,
                   "a directory of the kvmd that is stopped; once for each of disk.directories")
      ->required()
      ->type_name("PATH")
      ->expected(1)
      ->take_all();
}

}  // namespace

void add_snapshot_file_commands(Cli* cli, CLI::App* snapshot) {
  const auto out = std::make_shared<FileOptions>();
  CLI::App* exports = cli->add(
      "export", "write one to a file, while kvmd is stopped; changes nothing in its directories",
      [out](const Common& common) { return run_export(common, *out); }, snapshot);
  exports->add_option("name", out->name, "of the snapshot")->required()->type_name("NAME");
  exports->add_option("file", out->file, "the file to make")->required()->type_name("FILE");
  add_directories(exports, out.get());
  exports->add_option("--user", out->user, "whose it is, by name or number; else the caller's")
      ->type_name("USER");
  exports->add_flag("--replace", out->replaces, "replace the file if it is there");

  const auto in = std::make_shared<FileOptions>();
  CLI::App* imports = cli->add(
      "import", "put one that was exported into the directories of a kvmd that is stopped",
      [in](const Common& common) { return run_import(common, *in); }, snapshot);
  imports->add_option("file", in->file, "the file")->required()->type_name("FILE");
  add_directories(imports, in.get());
  imports->add_option("--name", in->name, "its name; else the one that it had")->type_name("NAME");
  imports->add_option("--user", in->user, "whose it is to be, by name or number; else whose it was")
      ->type_name("USER");
  imports->add_flag("--replace", in->replaces, "replace the snapshot of that name if there is one");
  imports
      ->add_option("--capacity", in->capacity,
                   "disk.capacity of the kvmd that will run there; else as its options say")
      ->type_name("SIZE");
  imports->add_option("--config", in->config, "the file that has its options, if kvmd gets one")
      ->type_name("PATH");
}

}  // namespace kvm::tools
