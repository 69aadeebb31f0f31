// SPDX-License-Identifier: Apache-2.0
// kvmctl fsck: whether what lies in the directories of a kvmd that is stopped is whole.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "tiers/disk/disk_check.h"
#include "tiers/disk/disk_view.h"
#include "tools/kvmctl/cli.h"
#include "tools/kvmctl/offline.h"
#include "tools/kvmctl/values.h"

namespace kvm::tools {
namespace {

tiers::ObjectInfo info_of(const tiers::FoundObject& object) {
  return {.key = object.key,
          .label = object.label,
          .n_pages = object.n_pages,
          .page_bytes = object.page_bytes,
          .body_bytes = object.body_bytes,
          .is_lost = object.is_lost};
}

Json check_json(const tiers::DiskView& view, const tiers::DiskCheck& check) {
  Json snapshots = Json::array();
  for (size_t i = 0; i < check.objects.size(); ++i) {
    const engine::SnapshotInfo info = snapshot_of(info_of(view.found().objects[i]));
    const tiers::CheckedObject& checked = check.objects[i];
    snapshots.push_back({{"name", info.name.name},
                         {"uid", info.name.uid},
                         {"space", info.space_name},
                         {"tokens", info.n_tokens},
                         {"bytes", info.bytes},
                         {"saved", time_text(info.saved_ns)},
                         {"whole", checked.damage.empty()},
                         {"damage", checked.damage},
                         {"damaged_pages", checked.n_damaged_pages}});
  }
  Json damages = Json::array();
  for (const tiers::DiskDamage& damage : check.damages) {
    damages.push_back({{"file", damage.path},
                       {"offset", damage.offset ? Json(*damage.offset) : Json()},
                       {"what", damage.what},
                       {"loss", damage.is_loss}});
  }
  const tiers::RecoveryReport& report = view.found().report;
  return {{"directories", view.directories()},
          {"whole", check.is_whole()},
          {"list", view.found().manifest.has_value()},
          {"snapshots", snapshots},
          {"snapshots_damaged", check.n_damaged_objects},
          {"damages", damages},
          {"damages_total", check.n_damages},
          {"segments", check.n_segments},
          {"segments_free", check.n_free_segments},
          {"segments_open", report.n_open_segments},
          {"segment_bytes", check.segment_bytes},
          {"live_records", check.n_live_records},
          {"live_bytes", check.live_bytes},
          {"damaged_records", check.n_damaged_records},
          {"dead_records", check.n_dead_records},
          {"dead_bytes", check.dead_bytes},
          {"torn_records", check.n_torn_records},
          {"torn_list_blocks", report.n_torn_blocks},
          {"read_bytes", check.n_read_bytes},
          {"seconds", static_cast<double>(check.duration_ns) / 1e9}};
}

void print_check(const tiers::DiskView& view, const tiers::DiskCheck& check) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "USER", "SPACE", "TOKENS", "BYTES", "STATE"}};
  for (size_t i = 0; i < check.objects.size(); ++i) {
    const engine::SnapshotInfo info = snapshot_of(info_of(view.found().objects[i]));
    const tiers::CheckedObject& checked = check.objects[i];
    rows.push_back({info.name.name, user_name(info.name.uid), info.space_name,
                    std::to_string(info.n_tokens), bytes_text(info.bytes),
                    checked.damage.empty() ? "whole" : "damaged: " + checked.damage});
  }
  if (!check.objects.empty()) {
    print_table(rows);
    fmt::print("\n");
  }
  for (const tiers::DiskDamage& damage : check.damages) {
    fmt::print("{}{}: {}{}\n", damage.path,
               damage.offset ? fmt::format(", offset {}", *damage.offset) : "", damage.what,
               damage.is_loss ? "" : " (nothing is lost by it)");
  }
  if (check.damages.size() < check.n_damages) {
    fmt::print("and {} more\n", check.n_damages - check.damages.size());
  }
  if (check.n_damages != 0) {
    fmt::print("\n");
  }
  fmt::print("{}, {} damaged; {}.\n", counted(check.objects.size(), "snapshot"),
             check.n_damaged_objects, counted(check.n_damages, "damaged place"));
  fmt::print("{} with {}: {} in use with {}, {} damaged; {} dead with {}, {} not whole; {} free.\n",
             counted(check.n_segments, "segment"), bytes_text(check.segment_bytes),
             counted(check.n_live_records, "record"), bytes_text(check.live_bytes),
             check.n_damaged_records, check.n_dead_records, bytes_text(check.dead_bytes),
             check.n_torn_records, counted(check.n_free_segments, "segment"));
  if (!view.found().manifest.has_value() && check.n_damages == 0 && check.n_segments != 0) {
    fmt::print(
        "There is no list of snapshots, and nothing was saved: the next kvmd removes what is in "
        "the segments.\n");
  }
  if (view.found().report.n_torn_blocks != 0) {
    fmt::print("A change of the list of snapshots was being written when kvmd ended.\n");
  }
  fmt::print("{} were read in {:.1f} s, {}.\n", bytes_text(check.n_read_bytes),
             static_cast<double>(check.duration_ns) / 1e9,
             rate_text(check.n_read_bytes, check.duration_ns));
}

struct FsckOptions {
  std::vector<std::string> directories;
  bool shows_progress = false;
};

int run_fsck(const Common& common, const FsckOptions& options) {
  auto view = tiers::DiskView::open(options.directories);
  if (!view.is_ok()) {
    fail_offline(view.status());
  }
  Progress progress("checking", options.shows_progress);
  const auto check = tiers::check_disk(
      view.value().get(),
      {.check_body =
           [](const tiers::FoundObject& object, std::span<const std::byte> body) {
             return wrong_with_body(object.key, object.n_pages, body);
           },
       .on_progress = [&](uint64_t n_read, uint64_t n_all) { progress.show(n_read, n_all); }});
  progress.begin("");
  if (!check.is_ok()) {
    fail_offline(check.status());
  }
  if (common.json) {
    print_json(check_json(*view.value(), check.value()));
  } else {
    print_check(*view.value(), check.value());
  }
  return check.value().is_whole() ? kExitOk : kExitCheck;
}

}  // namespace

void add_fsck_command(Cli* cli) {
  const auto options = std::make_shared<FsckOptions>();
  CLI::App* const fsck = cli->add(
      "fsck",
      "whether what a kvmd that is stopped has in its directories is whole; changes nothing",
      [options](const Common& common) { return run_fsck(common, *options); });
  fsck->add_option("directory", options->directories, "all of disk.directories, in any order")
      ->required()
      ->type_name("DIR");
  fsck->add_flag("--progress", options->shows_progress,
                 "say each second on standard error how far it is, if that is no terminal, too");
  fsck->footer(
      "Exit status: 0 all is whole; 4 something is damaged, or missing among what is there; 1 it\n"
      "could not be checked (a kvmd runs there, a directory is missing, or is not one of those\n"
      "that belong together, a drive does not answer); 2 wrong usage.");
}

}  // namespace kvm::tools
